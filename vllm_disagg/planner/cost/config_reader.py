"""Reads typed fields of a config.json, and notes which fields have been read."""

from __future__ import annotations

from typing import Any

from ...errors import ConfigError

MAX_SIZE = 1 << 24  # of any number: contexts of 10 million tokens are the largest

# Fields that change the size of a model. One that is set and that its family does not read makes
# the sizes wrong, so the model is refused.
SIZE_FIELDS = (
    "attention_chunk_size",
    "attn_layer_indices",
    "attn_layer_period",
    "attn_type_list",
    "block_configs",
    "compress_ratios",
    "cross_attention_layers",
    "global_head_dim",
    "hidden_size_per_layer_input",
    "hybrid_override_pattern",
    "index_topk",
    "kv_lora_rank",
    "layer_types",
    "layers_block_type",
    "linear_attn_config",
    "linear_num_value_heads",
    "mamba_d_state",
    "mamba_num_heads",
    "moe_latent_size",
    "moe_layer_freq",
    "moe_num_experts",
    "n_routed_experts",
    "num_experts",
    "num_global_key_value_heads",
    "num_kv_shared_layers",
    "num_local_experts",
    "sliding_window",
    "ssm_state_size",
    "swa_num_key_value_heads",
)


class ConfigReader:
    """Reads typed fields of a config.json. Errors name the wrong field."""

    def __init__(self, name: str, config: dict[str, Any]) -> None:
        self._name = name
        self._config = config
        self._read: set[str] = set()

    def error(self, problem: str) -> ConfigError:
        """Returns an error about this model."""
        return ConfigError(f"--model: {problem}")

    def need(self, *fields: str) -> int:
        """Returns the first of `fields` that is set. Raises ConfigError if none is."""
        for field in fields:
            if self.value(field) is not None:
                return self.number(field, 0, 1)
        raise self.error(f"the config.json of {self._name} has no {fields[0]}")

    def value(self, field: str) -> Any:
        """Returns a field as it is; None if it is absent."""
        self._read.add(field)
        return self._config.get(field)

    def number(self, field: str, default: int, least: int = 0) -> int:
        """Returns a whole number of `least` or more."""
        value = self.value(field)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_SIZE:
            raise self.error(
                f"{field} of {self._name} is {repr(value)[:80]}, not a whole number of {least} or"
                f" more, up to {MAX_SIZE}"
            )
        return value

    def first_number(self, *fields: str) -> int:
        """Returns the first of `fields` that is not 0, or 0."""
        numbers = [self.number(field, 0) for field in fields]
        return next((number for number in numbers if number), 0)

    def flag(self, field: str, default: bool) -> bool:
        """Returns a boolean."""
        value = self.value(field)
        return value if isinstance(value, bool) else default

    def text(self, field: str) -> str:
        """Returns a text, or an empty one."""
        return str(self.value(field) or "")

    def texts(self, field: str, length: int) -> list[str]:
        """Returns a list of `length` texts; empty if it is absent."""
        value = self.value(field)
        if value is None:
            return []
        if not isinstance(value, list) or len(value) != length:
            raise self.error(f"{field} of {self._name} is not a list with {length} layers")
        return [str(entry) for entry in value]

    def refuse_unread(self) -> None:
        """Raises ConfigError with the first field of sizes that is set and was not read."""
        for field in SIZE_FIELDS:
            if self._config.get(field) and field not in self._read:
                kind = self._config.get("model_type")
                raise self.error(
                    f"{field} of {self._name}, a {kind}, changes its size in a way that the"
                    " planner does not read: give --profile of an instance"
                )
