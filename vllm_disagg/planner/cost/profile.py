"""Measured points, as `vllm-disagg profile` writes them, and the latency model fitted to them.

The fit has the least squares of relative errors. Coefficients are not negative. DistServe's own fit
has no such limit: its OPT-66B TP2 has a negative quadratic term.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Annotated

import msgspec
from packaging.version import InvalidVersion, Version

from ...errors import ConfigError
from ...fleet.conventions import OLDEST_VLLM
from .hardware import GpuType, MeasuredHandoff, type_of
from .known_models import key_within
from .latency import LinearLatency

Coefficients = tuple[float, float, float]


# Version 1 had the path of a request in the times of steps.
PROFILE_VERSION = 2
MAX_TOKENS = 1 << 40  # of KV or of a step: more is a slip
MIN_STEP_SECONDS = 1e-9
MAX_STEP_SECONDS = 1e6
MIN_MIXED_POINTS = 3  # for a fit of steps with prompts beside decodes


class _ProfileVersion(msgspec.Struct, frozen=True):
    """Version of a file of measured points."""

    version: int


class PrefillPoint(msgspec.Struct, frozen=True):
    """Prompts computed together, and the seconds of their steps."""

    tokens: list[int]
    seconds: float


class DecodePoint(msgspec.Struct, frozen=True):
    """Contexts of the running sequences, and the seconds of one step."""

    contexts: list[int]
    seconds: float


class MixedPoint(msgspec.Struct, frozen=True):
    """Prompts computed beside decoding sequences, and the seconds of the step."""

    tokens: list[int]
    contexts: list[int]
    seconds: float


class ProfilePath(msgspec.Struct, frozen=True):
    """Seconds of a request outside the engine: fixed, and for each token of its prompt."""

    seconds: Annotated[float, msgspec.Meta(ge=0, le=MAX_STEP_SECONDS)]
    seconds_per_token: Annotated[float, msgspec.Meta(ge=0, le=MAX_STEP_SECONDS)]


class ProfilePoints(msgspec.Struct, frozen=True, kw_only=True):
    """File of measured points of one instance, with its start parameters."""

    version: int
    model: str
    vllm: str = ""
    machine: str = ""
    gpu: str = ""
    tensor_parallel_size: Annotated[int, msgspec.Meta(ge=1, le=1024)] | None = None
    # Other instances of the machine that were under load during the measurement.
    beside: Annotated[int, msgspec.Meta(ge=0)] = 0
    kv_tokens: int
    max_num_batched_tokens: int | None = None
    path: ProfilePath
    prefill: list[PrefillPoint]
    decode: list[DecodePoint]
    mixed: list[MixedPoint] = []
    handoff: MeasuredHandoff | None = None  # to decode instances, through a proxy


class FitResidual(msgspec.Struct, frozen=True):
    """A measured point beside its fitted value; `error` is relative."""

    phase: str
    sizes: list[int]
    measured: float
    fitted: float
    error: float


class LatencyFit(msgspec.Struct, frozen=True):
    """A latency model fitted to measured points, and its residuals."""

    latency: LinearLatency
    residuals: list[FitResidual]

    def phases(self) -> list[str]:
        """Lists the phases that have points, in their order."""
        return list(dict.fromkeys(residual.phase for residual in self.residuals))

    def worst(self, phase: str) -> float:
        """Largest relative error of one phase."""
        return max(abs(r.error) for r in self.residuals if r.phase == phase)

    def mean(self, phase: str) -> float:
        """Mean relative error of one phase."""
        errors = [abs(r.error) for r in self.residuals if r.phase == phase]
        return sum(errors) / len(errors)


def load(path: str) -> ProfilePoints:
    """Loads and checks a file of points. Raises ConfigError with the name of the wrong field."""
    try:
        content = Path(path).read_bytes()
        version = msgspec.json.decode(content, type=_ProfileVersion).version
        if version != PROFILE_VERSION:
            raise ConfigError(
                f"--profile: {path}: version is {version}; this release reads {PROFILE_VERSION}:"
                " run vllm-disagg profile again"
            )
        points = msgspec.json.decode(content, type=ProfilePoints)
    except OSError as error:
        raise ConfigError(f"--profile: {path} cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"--profile: {path}: {error}") from None
    if problem := _problem(points):
        raise ConfigError(f"--profile: {path}: {problem}")
    return points


def check_model(points: ProfilePoints, path: str, model: str) -> None:
    """Raises ConfigError if the points are of another model than the one of --model.

    A local folder may have any name: it is of another model only if its name is a known one.
    """
    folder = Path(model)
    is_local = folder.exists()
    if is_local and folder.is_file():
        folder = folder.parent
    wanted = key_within(str(folder.resolve()) if is_local else model)
    measured = key_within(points.model)
    if points.model == model or wanted == measured or (is_local and not (wanted and measured)):
        return
    raise ConfigError(
        f"--profile: {path} measured {points.model}, not {model}: give the --model that it"
        " measured, or a profile of this one"
    )


def check_gpu(points: ProfilePoints, flag: str, path: str, gpu: GpuType) -> None:
    """Raises ConfigError unless the points, of the file that `flag` names, are of this GPU."""
    measured = type_of(points.gpu)
    if measured == gpu.name:
        return
    gpu_flag = flag.replace("profile", "gpu")
    left_out = "leave --gpu out" if gpu_flag == "--gpu" else "leave --gpu and --decode-gpu out"
    if not points.gpu:
        where = f" ({points.machine})" if points.machine else ""
        raise ConfigError(
            f"{flag}: {path} names no GPU{where}, so it is not known to be of {gpu.name}:"
            f" run vllm-disagg profile on the instance's machine, or {left_out}"
        )
    its_own = f"give {gpu_flag} {measured}" if measured else left_out
    raise ConfigError(
        f"{flag}: {path} measured {points.gpu}, not {gpu.name}: {its_own}, or give a profile of"
        f" {gpu.name}"
    )


def check_pair(prefill: ProfilePoints, decode: ProfilePoints) -> None:
    """Raises ConfigError if P and D were measured with different models."""
    first, second = (points.model.rpartition("/")[2].lower() for points in (prefill, decode))
    key = key_within(prefill.model)
    if first != second and (not key or key != key_within(decode.model)):
        raise ConfigError(
            f"--decode-profile: it measured {decode.model}, and --profile {prefill.model}:"
            " give profiles of one model"
        )


def _is_too_old(vllm: str) -> bool:
    """Returns whether this release does not work with the vLLM that was measured."""
    try:
        return Version(vllm).release[:2] < OLDEST_VLLM.release
    except InvalidVersion:
        return False  # of a build without a number


def _problem(points: ProfilePoints) -> str:
    """Returns the first invalid field and its value, or an empty text."""
    if _is_too_old(points.vllm):
        return f"vllm is {points.vllm}; this release works with {OLDEST_VLLM} and newer"
    for field, value in (
        ("kv_tokens", points.kv_tokens),
        ("max_num_batched_tokens", points.max_num_batched_tokens),
    ):
        if value is not None and not 1 <= value <= MAX_TOKENS:
            return f"{field} is {str(value)[:80]}, not between 1 and {MAX_TOKENS}"
    for phase, sizes in (
        ("prefill", [(point.tokens, point.seconds) for point in points.prefill]),
        ("decode", [(point.contexts, point.seconds) for point in points.decode]),
    ):
        field = "tokens" if phase == "prefill" else "contexts"
        if len(sizes) < 3:
            return f"{phase} has {len(sizes)} points; a fit needs 3 or more"
        for number, (lengths, seconds) in enumerate(sizes):
            place = f"{phase}[{number}]"
            if not lengths or min(lengths) < 1 or sum(lengths) > MAX_TOKENS:
                found = json.dumps(lengths)[:80]
                return f"{place}.{field} is {found}, not a list of lengths of 1 or more"
            if problem := _seconds_problem(seconds):
                return f"{place}.{problem}"
    return _mixed_problem(points.mixed)


def _seconds_problem(seconds: float) -> str:
    """Returns why this is no time of a step, or an empty text."""
    if MIN_STEP_SECONDS <= seconds <= MAX_STEP_SECONDS:
        return ""
    return f"seconds is {seconds}, not between {MIN_STEP_SECONDS:g} and {MAX_STEP_SECONDS:g}"


def _mixed_problem(points: Sequence[MixedPoint]) -> str:
    """Returns the first invalid field of the mixed points, or an empty text."""
    for number, point in enumerate(points):
        if min([*point.tokens, *point.contexts, len(point.tokens), len(point.contexts)]) < 1:
            return f"mixed[{number}] has no prompt, no context, or one without tokens"
        if sum(point.tokens) + sum(point.contexts) > MAX_TOKENS:
            return f"mixed[{number}] has more than {MAX_TOKENS} tokens"
        if problem := _seconds_problem(point.seconds):
            return f"mixed[{number}].{problem}"
    return ""


def fit(points: ProfilePoints) -> LatencyFit:
    """Fits prefill and decode times.

    A prompt longer than the token budget pays the constant of each of its steps.
    """
    chunk = points.max_num_batched_tokens or 1 << 60
    prefill_rows = []
    for point in points.prefill:
        total = sum(point.tokens)
        prefill_rows.append([-(-total // chunk), total, sum(n * n for n in point.tokens)])
    decode_rows = []
    for step in points.decode:
        sequences = len(step.contexts)
        decode_rows.append([1, sum(step.contexts) + sequences, sequences])
    prefill = non_negative(prefill_rows, [point.seconds for point in points.prefill])
    decode = non_negative(decode_rows, [step.seconds for step in points.decode])
    residuals = []
    for point, row in zip(points.prefill, prefill_rows, strict=True):
        residuals.append(_residual("prefill", point.tokens, point.seconds, prefill, row))
    for step, row in zip(points.decode, decode_rows, strict=True):
        residuals.append(_residual("decode", step.contexts, step.seconds, decode, row))
    latency = LinearLatency(1, prefill, decode, decode, chunk=chunk)
    latency = msgspec.structs.replace(latency, beside=_beside(points.mixed, latency))
    for mixed in points.mixed:
        fitted = _mixed_seconds(mixed, latency)
        sizes = [*mixed.tokens, *mixed.contexts]
        error = fitted / mixed.seconds - 1
        residuals.append(FitResidual("mixed", sizes, mixed.seconds, fitted, error))
    return LatencyFit(latency, residuals)


def _mixed_seconds(point: MixedPoint, latency: LinearLatency) -> float:
    """Returns the seconds of a step with prompts beside decodes."""
    squares = float(sum(n * n for n in point.tokens))
    count = len(point.contexts)
    return latency.mixed(sum(point.tokens), squares, count, sum(point.contexts), True)


def _beside(points: Sequence[MixedPoint], latency: LinearLatency) -> Coefficients:
    """Fits what prompts beside decodes take longer than both apart, if they do."""
    if len(points) < MIN_MIXED_POINTS:
        return 0.0, 0.0, 0.0
    rows = [[1, sum(point.tokens), len(point.contexts)] for point in points]
    seconds = [point.seconds for point in points]
    lacking = [point.seconds - _mixed_seconds(point, latency) for point in points]
    return non_negative(rows, seconds, lacking)


def _residual(
    phase: str, sizes: list[int], seconds: float, coefficients: Coefficients, row: Sequence[int]
) -> FitResidual:
    """Compares the measured seconds of a point with the fitted ones."""
    fitted = sum(c * x for c, x in zip(coefficients, row, strict=True))
    return FitResidual(phase, sizes, seconds, fitted, fitted / seconds - 1)


def non_negative(
    rows: Sequence[Sequence[int]],
    seconds: Sequence[float],
    wanted: Sequence[float] | None = None,
) -> Coefficients:
    """Returns the three coefficients >= 0 with the least sum of squared relative errors.

    They fit `seconds`, or `wanted` with errors relative to `seconds`.
    The result is exact. The optimum is an unconstrained least squares over the terms that are not
    zero in it, so all seven sets of terms are tried.
    """
    import numpy as np  # noqa: PLC0415  (100 ms that most commands do not need)

    weights = 1 / np.asarray(seconds, dtype=float)
    matrix = np.asarray(rows, dtype=float) * weights[:, None]
    scale = np.abs(matrix).max(axis=0)
    targets = np.asarray(seconds if wanted is None else wanted, dtype=float) * weights
    best = np.zeros(3)
    least = float((targets**2).sum())
    for size in (3, 2, 1):
        for terms in combinations(range(3), size):
            columns = list(terms)
            found, *_ = np.linalg.lstsq(matrix[:, columns] / scale[columns], targets, rcond=None)
            full = np.zeros(3)
            full[columns] = found / scale[columns]
            error = float(((matrix @ full - targets) ** 2).sum())
            if (found >= 0).all() and error < least - 1e-12:
                best = full
                least = error
    return float(best[0]), float(best[1]), float(best[2])
