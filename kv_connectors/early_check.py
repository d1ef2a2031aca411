"""Checks the connector's settings when vLLM has its configuration, before any process starts.

vLLM creates connectors after it has loaded the weights. There a mistake costs minutes, and its
message drowns in those of all other processes. vLLM has no hook for an earlier check, so the end of
a configuration is wrapped. The states of the model's files are noted there, too: see
`fingerprint.py`.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from vllm_disagg import config
from vllm_disagg.errors import ConfigError
from vllm_disagg.fleet import keys

from .fingerprint import note_configs, note_files

CONNECTOR = "DisaggConnector"
# Connectors that may not be children of MultiConnector beside this one, and why.
_MOVES_KV_TOO = "also moves KV from P to D"
_IS_NESTED = "may not be inside another MultiConnector"
REFUSED_SIBLINGS = {
    "DisaggConnector": "may be there only once",
    "NixlConnector": _MOVES_KV_TOO,
    "NixlPullConnector": _MOVES_KV_TOO,
    "NixlPushConnector": _MOVES_KV_TOO,
    "MooncakeConnector": _MOVES_KV_TOO,
    "MoRIIOConnector": _MOVES_KV_TOO,
    "P2pNcclConnector": _MOVES_KV_TOO,  # before vLLM 0.32
    "HiSparseConnector": "keeps a part of the KV in a pool of its own",
    "MultiConnector": _IS_NESTED,
    "DecodeBenchConnector": "fills the cache with numbers that no model computed",
    # In the step that computes the rest. vLLM computes again what a failed load has spoiled, and
    # no connector hears of that. P has handed the spoiled KV over by then.
    "LMCacheConnectorV1": "loads KV in the step that hands it over (LMCacheMPConnector does not)",
    "FlexKVConnectorV1": "writes over the reports of other connectors",
}


def install() -> None:
    """Wraps the completion of vLLM's configuration, once.

    It raises ConfigError for bad settings from then on.
    """
    # vLLM loads plugins when this module of its own is complete.
    from vllm.config import VllmConfig  # noqa: PLC0415

    complete = VllmConfig.__post_init__
    if getattr(complete, "checks_settings", False):
        return

    @wraps(complete)
    def check_and_complete(self: Any) -> None:
        found = settings_in(self.kv_transfer_config)
        if not found:
            complete(self)
            return
        for extra in found:
            check(extra)
        _share_failure_policy(self.kv_transfer_config)
        _refuse_offloading_flag(self.cache_config)
        images = getattr(self.model_config, "multimodal_config", None)
        takes_embeddings = getattr(images, "enable_mm_embeds", False)
        complete(self)
        if images is not None:
            _require_embeddings(images, takes_embeddings)
        note_files(self)
        note_configs(self)

    check_and_complete.checks_settings = True  # type: ignore[attr-defined]
    VllmConfig.__post_init__ = check_and_complete  # type: ignore[method-assign]


def _share_failure_policy(transfer: Any) -> None:
    """Gives this connector, as a child of MultiConnector, that one's policy for failed loads.

    vLLM's scheduler obeys the outer one only. Raises ConfigError if the child names another.
    """
    if transfer.kv_connector != "MultiConnector":
        return
    outer = transfer.kv_load_failure_policy
    for child in _settings(transfer.kv_connector_extra_config)["connectors"]:
        if child["kv_connector"] != CONNECTOR:
            continue
        named = child.setdefault("kv_load_failure_policy", outer)
        if named != outer:
            raise ConfigError(
                f"kv_load_failure_policy of {CONNECTOR} in MultiConnector is {named!r}, but vLLM"
                f" obeys that of MultiConnector itself, {outer!r}: set it beside"
                ' "kv_connector": "MultiConnector"'
            )


def _refuse_offloading_flag(cache: Any) -> None:
    """Raises ConfigError for a flag with which vLLM would put another connector in this place.

    vLLM does so without a word, and makes the role `kv_both`.
    """
    if getattr(cache, "kv_offloading_size", None) is not None:
        raise ConfigError(
            f"--kv-offloading-size takes {CONNECTOR} out of --kv-transfer-config: start without"
            f" it, with MultiConnector of {CONNECTOR} and OffloadingConnector"
        )


def _require_embeddings(images: Any, takes_embeddings: bool) -> None:
    """Restores the user's choice about images that are sent as embeddings.

    vLLM lets an engine that loads KV take such images without their numbers, and as of 0.32 without
    the flag: its own connectors never compute a prompt there. This one may, and an image without
    numbers would end the engine. `takes_embeddings`: `--enable-mm-embeds` as given.
    """
    images.enable_mm_embeds = takes_embeddings
    images.allow_missing_mm_embeddings = False


def check(extra: dict[str, Any]) -> None:
    """Raises ConfigError for settings, or a key file, with which no engine can start."""
    settings = config.parse(extra)
    keys.load(settings.key_file, insecure=settings.insecure)


def settings_in(transfer: Any) -> list[dict[str, Any]]:
    """Returns the settings of each use of this connector, also as a child of MultiConnector.

    Raises ConfigError for settings in which the uses cannot be found.
    """
    if transfer is None:
        return []
    return _settings_of(transfer.kv_connector, transfer.kv_connector_extra_config)


def _settings_of(connector: object, extra: object) -> list[dict[str, Any]]:
    if connector == CONNECTOR:
        return [_settings(extra)]
    if connector != "MultiConnector":
        return []
    children = _settings(extra).get("connectors", [])
    if not isinstance(children, list):
        raise ConfigError(
            f"kv_connector_extra_config: connectors of MultiConnector is {children!r},"
            " but must be a list"
        )
    found: list[dict[str, Any]] = []
    for child in children:
        if not isinstance(child, dict):
            raise ConfigError(
                f"kv_connector_extra_config: connectors of MultiConnector has {child!r},"
                " but each must be an object with kv_connector"
            )
        name = child.get("kv_connector")
        used = _settings_of(name, child.get("kv_connector_extra_config"))
        if used and name != CONNECTOR:
            raise ConfigError(
                f"kv_connector_extra_config: {CONNECTOR} is in a MultiConnector that {_IS_NESTED}:"
                " make it a child of the outer one"
            )
        found += used
    if found:
        _refuse_siblings([child.get("kv_connector") for child in children])
    return found


def _refuse_siblings(names: list[Any]) -> None:
    """Raises ConfigError for a child of MultiConnector that cannot work beside this connector.

    Two connectors that answer a finished request with the same fields of `kv_transfer_params` end
    vLLM's engine, and of two that load a request's KV only the first is called for.
    """
    names = list(names)
    names.remove(CONNECTOR)
    for name in names:
        if reason := REFUSED_SIBLINGS.get(str(name)):
            raise ConfigError(
                f"kv_connector_extra_config: connectors of MultiConnector has {name} beside"
                f" {CONNECTOR}, but {name} {reason}: leave one of them out"
            )


def _settings(extra: Any) -> dict[str, Any]:
    """Returns the settings of one connector; raises ConfigError if they are no JSON object."""
    if extra is None:
        return {}
    if not isinstance(extra, dict):
        raise ConfigError(f"kv_connector_extra_config is {extra!r}, but must be an object")
    return extra
