"""Checks the model's name before anything starts: vLLM would fail on it a minute later."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from ..errors import ConfigError
from ..setting_values import did_you_mean

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
URL = re.compile(r"\w+://[^/]+/([\w.-]+/[\w.-]+)(/.*)?")  # of a model's page
OBJECT_STORES = ("s3://", "gs://", "az://")  # from which vLLM loads
HUB_TIMEOUT_SECONDS = 8.0
# One of them is in each repository that vLLM can serve.
CONFIG_FILES = ("config.json", "params.json")
# With them vLLM takes the configuration from elsewhere, or loads a file of a repository.
OTHER_SOURCES = (
    "--config",
    "--config-format",
    "--hf-config-path",
    "--hf-overrides",
    "--hf-token",
    "--load-format",
    "--revision",
)


def check(model: str, extra: Sequence[str]) -> None:
    """Raises ConfigError if vLLM cannot find the model. `extra`: arguments of `vllm serve`."""
    if model.lower().startswith(OBJECT_STORES):
        return
    path = Path(model)
    if path.is_dir():
        if not any((path / name).is_file() for name in CONFIG_FILES):
            raise ConfigError(
                f"--model {model}: the folder holds no config.json, so vLLM cannot load a model"
                " from it"
            )
        return
    if path.is_file() or os.environ.get("VLLM_MODEL_REDIRECT_PATH"):
        return
    looks_like_path = model.startswith((".", "/", "~")) or model.count("/") > 1
    if looks_like_path and "://" not in model:
        raise ConfigError(
            f"--model {model}: no such folder; give an existing one, or a name such as"
            " Qwen/Qwen3-8B"
        )
    if not HUB_NAME.fullmatch(model):
        raise ConfigError(
            f"--model {model!r}: neither a folder nor a name as on the Hugging Face hub"
            f"{_meant(model)}"
        )
    is_elsewhere = any(word.partition("=")[0].replace("_", "-") in OTHER_SOURCES for word in extra)
    is_from_modelscope = os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true")
    if not (is_elsewhere or is_from_modelscope):
        _check_hub(model)


def _meant(model: str) -> str:
    """Returns a question with the name that a wrong text contains; empty without one."""
    if page := URL.fullmatch(model):
        name = page[1]
    else:
        name = re.sub(r"\s+", "-", model.strip().replace("\\", "/"))
        name = re.sub(r":[\w.-]+$", "", name)  # a tag, as images have
    return f"; did you mean {name}?" if HUB_NAME.fullmatch(name) else ""


def _check_hub(model: str) -> None:
    """Raises ConfigError if a model is neither in the cache of the hub nor on the hub."""
    # vLLM brings this library. Its import takes a second, which other commands need not wait.
    import huggingface_hub  # noqa: PLC0415
    from huggingface_hub import constants, errors  # noqa: PLC0415

    for name in CONFIG_FILES:
        try:
            if isinstance(huggingface_hub.try_to_load_from_cache(model, name), str):
                return
        except errors.HFValidationError:
            raise ConfigError(f"--model {model}: not a name that a model can have") from None
    cache = Path(constants.HF_HUB_CACHE)
    hint = did_you_mean(model, _cached_models(cache))
    if constants.HF_HUB_OFFLINE:
        raise ConfigError(f"--model {model}: not in {cache}, and HF_HUB_OFFLINE is set{hint}")
    try:
        huggingface_hub.HfApi().model_info(model, timeout=HUB_TIMEOUT_SECONDS)
    except errors.RepositoryNotFoundError:
        raise ConfigError(
            f"--model {model}: the Hugging Face hub has no such model, or only for a token with"
            f" access (HF_TOKEN){hint}"
        ) from None
    except errors.HfHubHTTPError:
        return  # too many requests, or a mirror that has files only: vLLM finds out
    except Exception as error:  # of whichever HTTP library it uses
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ConfigError(
            f"--model {model}: not in {cache}, and {constants.ENDPOINT} does not answer"
            f" ({reason}){hint}"
        ) from None


def _cached_models(cache: Path) -> list[str]:
    """Returns the names of the models in the cache of the hub."""
    found = []
    for folder in cache.glob("models--*"):
        found.append(folder.name.removeprefix("models--").replace("--", "/"))
    return found
