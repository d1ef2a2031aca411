"""Makes short digests of values and of weights files, equal in engines that have the same.

Theory of weights. Files are compared by samples, as to read all of them would take too long, and by
their small tensors. vLLM makes a connector minutes after it has loaded the weights. A folder may
have other files by then: a symbolic link was changed, or files were overwritten. Their digest would
be that of weights that this engine has not. So a digest of the files' states is noted before vLLM
loads them, and must be the same afterwards. It is noted in the environment, which the processes
that load weights inherit. No field of vLLM's configuration may have it: vLLM copies configurations
field by field, and refuses unknown ones. Ray's actors on other machines inherit no environment;
their files have times of their own.

Theory of configurations. The code of some models writes into the model's configuration while it is
loaded: MiniMax-M2 its `max_model_len`, EAGLE-3 the layers of its target. On a GPU an engine of one
rank loads the model in the scheduler's process, so that its connector finds those fields. Those of
an engine of several ranks are in other processes, and the two would never be paired. So a
configuration is digested before, and the digest is noted in the environment, too. So are positions:
rotary embeddings are chosen by `max_model_len` as they are made. `--max-model-len auto` lowers it
later, to what memory has room for.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from collections.abc import Iterable
from io import FileIO
from pathlib import Path
from typing import Any

# Each weights file is read in evenly spread samples: of 5 GB a sample every 20 MB, less than one
# matrix of a model with files of that size. To read all of a large model would take a minute at
# each start.
SAMPLES_PER_FILE = 256
MIN_SAMPLES_PER_FILE = 16
SAMPLE_BYTES = 4096
MAX_OTHER_BYTES = 64 << 20  # tokenizers have up to some 20 MiB
MAX_SAMPLES = 8192  # of all files: on a network's file system each may take a millisecond
# Tensors of up to so many bytes are read whole, as they lie between samples: scales of an fp8 KV
# cache or of activations may be all that a new calibration changes. Of the latter some files have
# thousands, and each may take a read. Those of KV are few, and by them P's bytes are numbers.
SMALL_TENSOR_BYTES = 4096
# Ends of the names that vLLM 0.32 reads as scales of KV, in any of its formats.
KV_SCALES = (
    "k_scale",
    "v_scale",
    "k_zero_point",
    "v_zero_point",
    "k_cache.scale",
    "v_cache.scale",
    "_proj.output_scale",
)
MAX_HEADER_BYTES = 100_000_000  # of a safetensors file, by its format
# Fields of a configuration that name other models, whose weights vLLM loads as parts of this one:
# Ultravox's. vLLM looks them up without a revision.
OTHER_MODELS = ("audio_model_id", "text_model_id")
# Folders beside a model's weights that have more of them, with settings of their own: encoders of
# sound, Kimi-Audio's and MiMo-Audio's.
OTHER_FOLDERS = ("whisper-large-v3", "audio_tokenizer")
SETTINGS_OF_OTHERS = ("config.json", "preprocessor_config.json")
LLAMA_4_LIMIT_TOKENS = 32768  # `attn_temperature_tuning` differs for longer positions
IGNORED_CONFIG_FIELDS = {"_name_or_path", "transformers_version", "torch_dtype", "dtype"}
# vLLM raises it to the engine's `max_model_len`, in which P and D may differ.
IGNORED_DRAFT_FIELDS = {"max_position_embeddings"}
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.tensors")
PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
# Files from which vLLM reads a quantization that a model's configuration does not have.
QUANTIZATION_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")

# State of a file: its place behind all symbolic links, size, mtime in ns. Not its inode, which some
# mounted buckets draw anew.
FileState = tuple[str, int, int]
_MODEL_FILES = (*WEIGHTS, *PROCESSOR_FILES, *QUANTIZATION_FILES)


def sample_files(place: Path) -> list[tuple[str, int, str]]:
    """Returns (name, size in bytes, digest of the samples) of each weights file, by name.

    `place`: a folder, or a single file. Raises OSError for a file that cannot be read.
    """
    sampled = []
    found = [place] if place.is_file() else [f for each in WEIGHTS for f in place.glob(each)]
    files = sorted(file for file in found if file.is_file())
    samples = min(SAMPLES_PER_FILE, MAX_SAMPLES // max(1, len(files)))
    samples = max(MIN_SAMPLES_PER_FILE, samples)
    for file in files:
        size = file.stat().st_size
        file_digest = hashlib.sha256()
        with file.open("rb", buffering=0) as opened:
            for number in range(samples):
                opened.seek(number * max(0, size - SAMPLE_BYTES) // (samples - 1))
                file_digest.update(opened.read(SAMPLE_BYTES))
            spans = _small_tensors(opened, size, samples) if file.suffix == ".safetensors" else []
            for start, end in spans:
                opened.seek(start)
                file_digest.update(opened.read(end - start))
        sampled.append((file.name, size, file_digest.hexdigest()))
    return sampled


def file_texts(folder: Path, patterns: Iterable[str]) -> dict[str, str]:
    """Returns the contents of small files of a folder, by name. Raises OSError."""
    found = {file for each in patterns for file in folder.glob(each) if file.is_file()}
    return {file.name: file.read_bytes().hex() for file in sorted(found)}


def _small_tensors(opened: FileIO, size: int, most: int) -> list[tuple[int, int]]:
    """Returns the places of small tensors in a safetensors file.

    All scales of the KV cache, then the others, neighbours as one, but of these at most `most`
    places. None of a file whose header is not that of the format.
    """
    opened.seek(0)
    header_bytes = int.from_bytes(opened.read(8), "little")
    if header_bytes > min(size, MAX_HEADER_BYTES):
        return []
    try:
        header = json.loads(opened.read(header_bytes))
        places = {name: entry["data_offsets"] for name, entry in header.items() if name[:2] != "__"}
        begin = 8 + header_bytes
        small = sorted(
            (begin + start, begin + end, name.endswith(KV_SCALES))
            for name, (start, end) in places.items()
            if type(start) is type(end) is int and 0 <= start < end <= start + SMALL_TENSOR_BYTES
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        return []
    of_kv = [(start, end) for start, end, is_of_kv in small if is_of_kv]
    others: list[tuple[int, int]] = []
    for start, end, is_of_kv in small:
        if is_of_kv:
            continue
        if others and others[-1][1] == start:
            others[-1] = (others[-1][0], end)
        else:
            others.append((start, end))
    return of_kv + others[:: max(1, -(-len(others) // most))]


def digest_other_files(folder: Path) -> list[tuple[str, int, str]]:
    """Returns (name, size in bytes, digest) of each file of a model that has no weights, by name.

    Of a file above MAX_OTHER_BYTES the digest is empty. Raises OSError.
    """
    weights = {file for pattern in WEIGHTS for file in folder.glob(pattern)}
    found = []
    for file in sorted(folder.iterdir()):
        if file.is_file() and file not in weights:
            size = file.stat().st_size
            is_read = size <= MAX_OTHER_BYTES
            content_digest = hashlib.sha256(file.read_bytes()).hexdigest() if is_read else ""
            found.append((file.name, size, content_digest))
    return found


def file_states(place: Path) -> list[FileState]:
    """Returns the states of the files whose content decides KV: weights, and processors' settings.

    `place`: a folder, or a single file; no states if there is none. Raises OSError.
    """
    found = [place] if place.is_file() else [f for each in _MODEL_FILES for f in place.glob(each)]
    states = []
    for file in filter(Path.is_file, found):  # a link may lead nowhere
        status = file.stat()
        states.append((str(file.resolve()), status.st_size, status.st_mtime_ns))
    return sorted(states)


def model_files(vllm_config: Any) -> list[FileState]:
    """Returns the states of the files of an engine's model and of its draft; none on a hub."""
    states: list[FileState] = []
    for model in _models(vllm_config):
        for place in weight_places(model):
            states += file_states(place)
    return states


def weight_places(model: Any) -> list[Path]:
    """Returns the places of the weights that vLLM loads for a model, its own first.

    A name on a hub is a place that does not exist.
    """
    place = Path(model.model)
    hf_config = getattr(model, "hf_config", None)
    names = [getattr(hf_config, field, None) for field in OTHER_MODELS]
    folders = [place / name for name in OTHER_FOLDERS if (place / name).is_dir()]
    return [place, *folders, *(Path(name) for name in names if name)]


def _models(vllm_config: Any) -> list[Any]:
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    return [model for model in (vllm_config.model_config, draft) if model is not None]


def note_files(vllm_config: Any) -> None:
    """Notes the states of a model's files, before vLLM loads them."""
    _note(_variable(vllm_config), digest(model_files(vllm_config)))


def note_configs(vllm_config: Any) -> None:
    """Notes the digests of the configurations of a model and of its draft, before their load.

    Of the model its positions, too.
    """
    if (target := vllm_config.model_config) is not None:
        _note(_positions_variable(target), _read_positions(target))
    for model in _models(vllm_config):
        is_draft = model is not vllm_config.model_config
        _note(_config_variable(model, is_draft), _digest_config(model, is_draft))


def config_digest(model: Any, *, is_draft: bool = False) -> str:
    """Returns the noted digest of a model's configuration, else one of what it is now."""
    noted = os.environ.get(_config_variable(model, is_draft))
    return noted or _digest_config(model, is_draft)


def _digest_config(model: Any, is_draft: bool) -> str:
    ignored = IGNORED_CONFIG_FIELDS | (IGNORED_DRAFT_FIELDS if is_draft else set())
    fields = model.hf_config.to_dict().items()
    return digest({name: value for name, value in fields if name not in ignored})


def positions(model: Any) -> str:
    """Returns the noted positions of a model, else what they are now."""
    return os.environ.get(_positions_variable(model)) or _read_positions(model)


def _positions_variable(model: Any) -> str:
    # As given: -1 for `auto`. Another engine of this process tree may have another one.
    given = getattr(model, "original_max_model_len", None)
    return f"DISAGG_POSITIONS_{digest([_config_variable(model, is_draft=False), given]).upper()}"


def _read_positions(model: Any) -> str:
    """Returns on which sides of the rotary embedding's limits the longest permitted prompt is.

    LongRoPE has two tables, and vLLM takes one of them for all prompts, by `max_model_len`.
    """
    text_config = getattr(model, "hf_text_config", model.hf_config)
    given: Any = getattr(text_config, "rope_parameters", None)
    if not given:
        given = getattr(text_config, "rope_scaling", None)
    rope: dict[str, Any] = given if isinstance(given, dict) else {}
    limits = []
    if getattr(text_config, "attn_temperature_tuning", False):
        limits.append(LLAMA_4_LIMIT_TOKENS)
    if "longrope" in (rope.get("rope_type"), rope.get("type")):
        name = "original_max_position_embeddings"
        limits.append(int(rope.get(name) or getattr(text_config, name, None) or 0))
    sides = []
    for limit in limits:
        side = "over" if model.max_model_len > limit else "up to"
        sides.append(f"{side} {limit}")
    return ", ".join(sides) or "of any length"


def _config_variable(model: Any, is_draft: bool) -> str:
    # vLLM makes a part of some models as a model with the same files and another architecture.
    architectures = getattr(model.hf_config, "architectures", None)
    # Another engine of this process tree may have other flags. Of a draft they are vLLM's function.
    overrides = getattr(model, "hf_overrides", None)
    flags = overrides if isinstance(overrides, dict) else None
    return f"DISAGG_CONFIG_{digest([model.model, architectures, flags, is_draft]).upper()}"


def _note(variable: str, value: str) -> None:
    """Notes a value in the environment, which the processes that load weights inherit."""
    # vLLM completes copies of a configuration in processes that have loaded the weights.
    is_child = multiprocessing.parent_process() is not None
    if not is_child or variable not in os.environ:
        os.environ[variable] = value


def files_have_changed(vllm_config: Any) -> bool:
    """Returns whether a model's files are not those noted; False where none were."""
    noted = os.environ.get(_variable(vllm_config))
    return noted is not None and noted != digest(model_files(vllm_config))


def _variable(vllm_config: Any) -> str:
    places = [model.model for model in _models(vllm_config)]
    return f"DISAGG_FILES_{digest(places).upper()}"


def digest(value: Any) -> str:
    """Returns 16 hexadecimal digits of the SHA-256 of a value, written as JSON with sorted keys."""
    encoded = json.dumps(value, sort_keys=True, default=str).encode()
    return hashlib.sha256(encoded).hexdigest()[:16]
