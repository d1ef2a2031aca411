"""Sources of step times that flags name: a roofline, profiles, coefficients or running engines."""

from __future__ import annotations

import argparse
from typing import NamedTuple

import msgspec

from ...errors import ConfigError
from ..cost import (
    aiconfigurator,
    distserve,
    hardware,
    known_models,
    model,
    profile,
    speculative,
)
from ..cost.latency import LinearLatency, PathDelay
from ..cost.roofline import FITTED_PATH
from ..cost.sizes import ModelCosts
from ..search.performance_source import PerformanceSource
from .flags import named

# No default is a free hand-off. A profile beside other instances of its machine is of one machine.
# With "live" the engines measured their own.
DEFAULT_LINKS = {
    "coefficients": "nvlink",
    "profile": "eth-25",
    "roofline": "ib-400",
    "aiconfigurator": "ib-400",
    "live": "none",
}


class StepSources(NamedTuple):
    """Sources of one kind, of prefill and of decode instances, and the fits to show."""

    kind: str  # a key of DEFAULT_LINKS
    prefill: PerformanceSource
    decode: PerformanceSource
    fits: list[tuple[str, profile.LatencyFit]]  # with the path of the file


def live_sources(args: argparse.Namespace, latency: LinearLatency) -> StepSources:
    """Returns sources whose step times running engines measure.

    Raises ConfigError for flags of other sources.
    """
    for flag in ("decode_gpu", "decode_profile"):
        if getattr(args, flag):
            raise ConfigError(f"{named(flag)} goes with --{flag.removeprefix('decode_')}")
    for flag in ("step_times", "node_gpus", "node_links"):
        if getattr(args, flag):
            raise ConfigError(f"{named(flag)} goes with --gpu")
    if args.speculative_config:
        raise ConfigError("--speculative-config goes with --gpu: --live measures drafts")
    loaded = model.load(args.model, args.kv_cache_dtype) if args.model else None
    source = PerformanceSource("live", "the running engines", loaded, fitted=latency)
    return StepSources("live", source, source, [])


def named_sources(args: argparse.Namespace, gpus: int) -> StepSources:
    """Returns the sources that the flags name, of instances of up to so many GPUs.

    Raises ConfigError for flags that do not fit.
    """
    _check_source(args)
    if args.profile:
        return _profiles(args)
    if args.decode_profile:
        raise ConfigError("--decode-profile goes with --profile")
    if not args.model:
        raise ConfigError(
            f"give --model: a folder with a config.json, or one of {', '.join(known_models.MODELS)}"
        )
    loaded = model.load(args.model, args.kv_cache_dtype)
    if args.expert_parallel and (args.coefficients or not loaded.experts):
        raise ConfigError("--expert-parallel goes with --gpu and a model that has experts")
    if args.coefficients:
        if args.decode_gpu:
            raise ConfigError("--decode-gpu goes with --gpu: the coefficients are of one GPU")
        distserve.degrees(args.coefficients, loaded.name)
        source = PerformanceSource("coefficients", args.coefficients, loaded)
        return StepSources("coefficients", source, source, [])
    prefill, decode = (_roofline(args, name) for name in (args.gpu, args.decode_gpu or args.gpu))
    if prefill.model and decode.model and prefill.model.kv != decode.model.kv:
        raise ConfigError(
            f"--decode-gpu: vLLM 0.32 stores the KV of {loaded.name} in another form on"
            f" {decode.name} than on {prefill.name}, so D cannot take it"
        )
    if args.step_times != "aiconfigurator":
        return StepSources("roofline", prefill, decode, [])
    is_same = prefill == decode
    prefill = _tabulated(args.model, prefill, gpus)
    decode = prefill if is_same else _tabulated(args.model, decode, gpus)
    return StepSources("aiconfigurator", prefill, decode, [])


def _check_source(args: argparse.Namespace) -> None:
    """Raises ConfigError unless one source is given, with flags that go with it."""
    given = [name for name in ("gpu", "profile", "coefficients") if getattr(args, name)]
    for name in ("node_gpus", "node_links", "speculative_config"):
        if getattr(args, name) and given != ["gpu"]:
            without = ", without --profile" if args.gpu and args.profile else ""
            raise ConfigError(f"{named(name)} goes with --gpu{without}")
    if args.step_times and given != ["gpu"]:
        raise ConfigError("--step-times goes with --gpu, without another source")
    if args.step_times == "aiconfigurator":
        for name in ("expert_parallel", "speculative_config"):
            if getattr(args, name):
                raise ConfigError(f"{named(name)} goes without --step-times aiconfigurator")
    if args.itl is not None and args.speculative_config:
        raise ConfigError("--itl goes without --speculative-config: steps have several tokens")
    if args.profile and args.expert_parallel:
        raise ConfigError("--expert-parallel goes with --gpu and a model that has experts")
    if len(given) != 1 and given != ["gpu", "profile"]:
        raise ConfigError(
            "give one of --gpu, --profile and --coefficients: the source of the step times"
        )


def _roofline(args: argparse.Namespace, name: str) -> PerformanceSource:
    """Returns the roofline of a GPU type."""
    config = args.speculative_config
    return PerformanceSource(
        kind="roofline",
        name=name,
        model=model.load(args.model, args.kv_cache_dtype, name),
        gpu=_in_nodes(args, hardware.gpu(name)),
        path=FITTED_PATH,
        expert_parallel=args.expert_parallel,
        drafts=speculative.parse(config, args.acceptance_length) if config else None,
    )


def _tabulated(name: str, roofline: PerformanceSource, gpus: int) -> PerformanceSource:
    """Returns a source with the package's tables of the shapes of a roofline without pipelines."""
    if not roofline.model or not roofline.gpu or not roofline.layouts(gpus):
        return roofline  # `check_model` refuses it
    degrees = [tp for tp, pp in roofline.shapes(gpus) if pp == 1]
    is_kv_fp8 = roofline.model.is_kv_fp8
    found = aiconfigurator.package_tables(name, roofline.gpu, degrees, is_kv_fp8=is_kv_fp8)
    return msgspec.structs.replace(
        roofline, kind="aiconfigurator", tables=tuple(found.by_degree.items()), origin=found.origin
    )


def _in_nodes(args: argparse.Namespace, gpu: hardware.GpuType) -> hardware.GpuType:
    """Returns a GPU with the nodes and links that the flags give."""
    found = msgspec.structs.replace(gpu, node=args.node_gpus or gpu.node)
    if not args.node_links:
        return found
    link = hardware.link(args.link or DEFAULT_LINKS["roofline"])
    return msgspec.structs.replace(found, fabric=link.bandwidth * args.node_links / found.node)


def _profiles(args: argparse.Namespace) -> StepSources:
    """Returns the sources of profiles. Raises ConfigError if a file is not of the GPU named."""
    gpu = args.gpu or ""
    loaded = model.load(args.model, args.kv_cache_dtype, gpu) if args.model else None
    if args.decode_gpu and not args.decode_profile:
        raise ConfigError("--decode-gpu goes with --gpu, or with --decode-profile")
    points = _points(args.profile, args.model)
    prefill, fits = _profiled(args.profile, points, loaded)
    prefill = _of_gpu(prefill, points, "--profile", args.gpu)
    decode = prefill
    if args.decode_profile:
        decode_points = _points(args.decode_profile, args.model)
        profile.check_pair(points, decode_points)
        decode, decode_fits = _profiled(args.decode_profile, decode_points, loaded)
        gpu = args.decode_gpu or args.gpu
        decode = _of_gpu(decode, decode_points, "--decode-profile", gpu)
        fits += decode_fits
    return StepSources("profile", prefill, decode, fits)


def _of_gpu(
    source: PerformanceSource, points: profile.ProfilePoints, flag: str, name: str
) -> PerformanceSource:
    """Returns a profile's source with the GPU type named, if one is; checks it with the file."""
    if not name:
        return source
    gpu = hardware.gpu(name)
    profile.check_gpu(points, flag, source.name, gpu)
    return msgspec.structs.replace(source, gpu=gpu)


def _points(path: str, name: str | None) -> profile.ProfilePoints:
    """Loads points. Raises ConfigError if they are of another model than the one named."""
    points = profile.load(path)
    if name:
        profile.check_model(points, path, name)
    return points


def _profiled(
    path: str, points: profile.ProfilePoints, loaded: ModelCosts | None
) -> tuple[PerformanceSource, list[tuple[str, profile.LatencyFit]]]:
    """Returns the source fitted to a file's points, and the fit with the file's path."""
    fit = profile.fit(points)
    ranks = points.tensor_parallel_size or 1
    source = PerformanceSource(
        kind="profile",
        name=path,
        model=loaded,
        fitted=fit.latency,
        kv_tokens=points.kv_tokens,
        budget=points.max_num_batched_tokens or 0,
        beside=points.beside,
        served=points.model,
        machine=points.machine,
        vllm=points.vllm,
        was_on_gpu=bool(points.gpu),
        measured_tp=ranks,
        path=PathDelay(points.path.seconds, points.path.seconds_per_token),
        link=points.handoff.link(ranks, has_bytes=bool(loaded)) if points.handoff else None,
    )
    return source, [(path, fit)]


def default_link(
    kind: str, prefill: PerformanceSource, decode: PerformanceSource
) -> hardware.NetworkLink:
    """Returns the link of sources of step times: as measured with them.

    Else it is the loopback if they had neighbours on one machine.
    """
    if prefill.link:
        return prefill.link
    is_one_machine = prefill.beside and prefill.machine == decode.machine
    return hardware.link("loopback" if is_one_machine else DEFAULT_LINKS[kind])
