"""Counts the published recipes of prefill/decode fleets that DisaggConnector would serve.

    python scripts/recipes.py [--verbose] [--update CHECKOUT]

`recipes.csv`, beside this file, has two rows for each recipe of vLLM with prefill and decode
instances in InferenceX, `benchmarks/multi_node`: the flags of each side that decide whether an
engine starts. In place of NixlConnector stands DisaggConnector. Each side is judged by
`kv_connectors.supported` and `early_check`, with the specs that vLLM makes for its model; GPUs, and
what only an engine finds out, are not judged. A recipe with two refusals is counted by the first.

Of those that would start, a pair is a recipe whose decode ranks find all KV at its prefill ranks:
the layouts of both sides, with their tensor parallelism, as `kv_connectors.gpu.layout` describes
them, and the plan that `vllm_disagg.kv.reshard` makes. Equal block sizes and attention backends of
P and D are assumed; the recipes name none.

The last line is JSON: all recipes, those that would start, those that are pairs, and the others by
reason. --update writes the table from a checkout of InferenceX again.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import yaml
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
)

from kv_connectors import early_check, supported
from kv_connectors.gpu.layout import device_layout
from kv_connectors.kv_layout import RankCache
from vllm_disagg.errors import ConfigError, Unmappable
from vllm_disagg.kv import reshard
from vllm_disagg.kv.layout import RankLayout

TABLE = Path(__file__).with_name("recipes.csv")
SOURCE = "github.com/SemiAnalysisAI/InferenceX"
RECIPES = "benchmarks/multi_node"
SIDES = ("prefill", "decode")
# Column of the table: flag of vLLM, and its default.
FLAGS: dict[str, tuple[str, Any]] = {
    "tp": ("tensor-parallel-size", 1),
    "pp": ("pipeline-parallel-size", 1),
    "dp": ("data-parallel-size", 1),
    "dcp": ("decode-context-parallel-size", 1),
    "hybrid_lb": ("data-parallel-hybrid-lb", False),
    "experts": ("enable-expert-parallel", False),
    "kv_cache_dtype": ("kv-cache-dtype", "auto"),
    "dbo": ("enable-dbo", False),
    "elastic_experts": ("enable-elastic-ep", False),
    "sleep_mode": ("enable-sleep-mode", False),
    "prefix_caching": ("enable-prefix-caching", False),
}
COLUMNS = ("recipe", "side", "model", *FLAGS, "drafts", "verification", "connectors")
KV_HEADS = 4  # of MiniMax-M3, the only model here that has several
OTHERS_TRANSFER = "NixlConnector"
OURS = "DisaggConnector"


def main() -> None:
    """Prints the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--verbose", action="store_true", help="print each refusal")
    parser.add_argument("--update", type=Path, metavar="CHECKOUT", help="write the table again")
    args = parser.parse_args()
    if args.update:
        write_table(args.update)
    found = count(read_table(), verbose=args.verbose)
    for reason, number in found["refused"].items():
        print(f"{number:4} refused: {reason}")
    print(json.dumps(found))


def read_table() -> list[dict[str, str]]:
    """Returns the rows of the table; lines that begin with # name the source."""
    with TABLE.open() as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def count(rows: list[dict[str, str]], *, verbose: bool = False) -> dict[str, Any]:
    """Returns the number of recipes, of those that would start, and of the others by reason."""
    recipes: dict[str, list[dict[str, str]]] = defaultdict(list)
    for row in rows:
        recipes[row["recipe"]].append(row)
    reasons: Counter[str] = Counter()
    pairs = 0
    for name, sides in recipes.items():
        refusals = [refusal for side in sides if (refusal := refusal_of(side))]
        if refusals:
            reasons[in_short(refusals[0])] += 1
            if verbose:
                print(f"{name}: {refusals[0]}")
            continue
        misfit = misfit_of(*sides)
        pairs += not misfit
        if misfit and verbose:
            print(f"{name}: no pair: {misfit}")
    start = len(recipes) - reasons.total()
    return {
        "of": len(recipes),
        "start": start,
        "pair": pairs,
        "refused": dict(reasons.most_common()),
    }


def in_short(refusal: str) -> str:
    """Returns a refusal without its numbers, names and remedy, so that equal reasons are equal."""
    return re.split(r"[;:(]", refusal.removeprefix(f"{OURS} "))[0].strip()


def refusal_of(row: dict[str, str]) -> str:
    """Returns why an engine with these flags would not start; empty if it would."""
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs(row)]
    try:
        early_check.settings_in(transfer_config(row))
        supported.refuse_unsupported(
            engine_config(row),
            SimpleNamespace(kv_cache_groups=groups),  # type: ignore[arg-type]
        )
    except ConfigError as error:
        return str(error)
    return ""


def misfit_of(prefill: dict[str, str], decode: dict[str, str]) -> str:
    """Returns why these engines exchange no KV; empty if each rank of D finds all of its KV."""
    for column in ("model", "kv_cache_dtype", "drafts"):
        if prefill[column] != decode[column]:
            return f"{column} is {prefill[column]} at P and {decode[column]} at D"
    try:
        reshard.plan(layouts(prefill), layouts(decode))
    except (ConfigError, Unmappable) as error:
        return str(error)
    return ""


def layouts(row: dict[str, str]) -> list[RankLayout]:
    """Returns the layouts of a replica's ranks, from caches of one block as vLLM allocates them."""
    size = int(row["tp"])
    if int(row["pp"]) > 1:
        raise ConfigError("the layers of pipeline stages are not counted here")
    found = []
    for number in range(size):
        groups = []
        caches = {}
        for at, spec in enumerate(specs(row)):
            name = f"model.layers.{at}.attn"
            groups.append(SimpleNamespace(kv_cache_spec=spec, layer_names=[name]))
            caches[name] = torch.empty(block_shape(spec), dtype=torch.uint8)
        backend = SimpleNamespace(get_name=lambda: "equal at P and D")
        layer = SimpleNamespace(get_attn_backend=lambda backend=backend: backend)
        context = dict.fromkeys(caches, layer)
        config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context))
        rank = RankCache(number, size, {KV_HEADS})
        found.append(device_layout(caches, groups, 1, rank, config).shape)
    return found


def block_shape(spec: Any) -> tuple[int, ...]:
    """Returns the axes of a cache of one block: blocks, heads, tokens, bytes; or of a state."""
    if isinstance(spec, MambaSpec):
        return 1, spec.state_content_size_bytes
    states = spec.block_size // spec.tokens_per_state
    return 1, spec.num_kv_heads, states, spec.state_content_size_bytes


def transfer_config(row: dict[str, str]) -> Any:
    """Returns vLLM's settings of KV transfers, with DisaggConnector in NixlConnector's place."""
    names = [OURS if name == OTHERS_TRANSFER else name for name in row["connectors"].split()]
    if len(names) == 1:
        return SimpleNamespace(kv_connector=names[0], kv_connector_extra_config={})
    children = [{"kv_connector": name} for name in names]
    return SimpleNamespace(
        kv_connector="MultiConnector", kv_connector_extra_config={"connectors": children}
    )


def engine_config(row: dict[str, str]) -> Any:
    """Returns the part of vLLM's configuration that `supported` reads."""
    parallel = {
        "tensor_parallel_size": int(row["tp"]),
        "pipeline_parallel_size": int(row["pp"]),
        "data_parallel_size": int(row["dp"]),
        "decode_context_parallel_size": int(row["dcp"]),
        "prefill_context_parallel_size": 1,
        "data_parallel_hybrid_lb": row["hybrid_lb"] == "True",
        "enable_expert_parallel": row["experts"] == "True",
        "enable_elastic_ep": row["elastic_experts"] == "True",
        "enable_fault_tolerance": False,
        "enable_dbo": row["dbo"] == "True",
        "ubatch_size": 0,
    }
    draft = SimpleNamespace(tensor_parallel_size=int(row["tp"]))
    return SimpleNamespace(
        device_config=SimpleNamespace(device_type="cuda"),
        parallel_config=SimpleNamespace(**parallel),
        model_config=SimpleNamespace(multimodal_config=None),
        lora_config=None,  # no recipe has adapters
        scheduler_config=SimpleNamespace(policy="fcfs"),  # no recipe has another one
        kv_transfer_config=SimpleNamespace(kv_role="kv_both"),
        cache_config=SimpleNamespace(
            cache_dtype=row["kv_cache_dtype"],
            enable_prefix_caching=row["prefix_caching"] == "True",
        ),
        speculative_config=(
            SimpleNamespace(
                method=row["drafts"],
                rejection_sample_method=row["verification"],
                draft_parallel_config=draft,
            )
            if row["drafts"]
            else None
        ),
    )


def specs(row: dict[str, str]) -> list[Any]:
    """Returns a spec of each kind of cache that vLLM 0.32 makes for a model."""
    fields_of_all: dict[str, Any] = {"num_kv_heads": 1, "head_size": 512, "dtype": torch.uint8}
    latent = MLAAttentionSpec(block_size=256, **fields_of_all)
    if "MiniMax-M3" in row["model"]:  # attention with an indexer of one head
        heads = max(1, KV_HEADS // int(row["tp"]))
        plain = FullAttentionSpec(block_size=128, **{**fields_of_all, "num_kv_heads": heads})
        return [plain, latent]
    if "DeepSeek-V4" in row["model"]:  # windows, and states of the compression
        return [latent, SlidingWindowMLASpec(block_size=64, sliding_window=128, **fields_of_all)]
    if "Kimi-K3" in row["model"]:  # linear attention (KDA) beside MLA
        states = MambaSpec(
            block_size=256,
            shapes=((4,), (4,)),
            dtypes=(torch.bfloat16, torch.float32),
            mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
            mamba_cache_mode="align" if row["prefix_caching"] == "True" else "none",
        )
        return [latent, states]
    if "Kimi-K2" in row["model"]:
        return [latent]
    raise SystemExit(f"recipes.csv: the caches of {row['model']} are not listed in specs()")


# Writing the table ------------------------------------------------------------------------------
def write_table(checkout: Path) -> None:
    """Writes the table from the recipes of a checkout of InferenceX."""
    rows = list(rows_of(checkout / RECIPES))
    revision = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "HEAD"],
        check=True,
        capture_output=True,
        text=True,
    )
    with TABLE.open("w", newline="") as file:
        file.write(f"# {SOURCE}, commit {revision.stdout.strip()}, {RECIPES}: flags of each\n")
        file.write("# recipe of vLLM with prefill and decode instances, by scripts/recipes.py\n")
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def rows_of(folder: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of all recipes below a folder."""
    for path in sorted(folder.rglob("*.y*ml")):
        recipe = yaml.safe_load(path.read_text())
        backend = recipe.get("backend") if isinstance(recipe, dict) else None
        if not isinstance(backend, dict) or backend.get("type") != "vllm":
            continue
        if not set(SIDES) <= set(backend["vllm_config"]):
            continue
        for side in SIDES:
            flags = backend["vllm_config"][side]
            model = flags.get("served-model-name", recipe["model"]["path"])
            yield {
                "recipe": path.relative_to(folder).with_suffix(""),
                "side": side,
                "model": MODEL_NAMES.get(model, model),
                **row_of({name.replace("_", "-"): value for name, value in flags.items()}),
            }


# Names of folders that recipes have in a model's place.
MODEL_NAMES = {"minimax-m3-mxfp8": "MiniMaxAI/MiniMax-M3-MXFP8"}


def row_of(flags: dict[str, Any]) -> dict[str, Any]:
    """Returns the columns of one side's flags."""
    row = {column: flags.get(flag, default) for column, (flag, default) in FLAGS.items()}
    drafts = json.loads(flags.get("speculative-config") or "{}")
    transfer = json.loads(flags["kv-transfer-config"])
    children = transfer.get("kv_connector_extra_config", {}).get("connectors", [transfer])
    connectors = " ".join(child["kv_connector"] for child in children)
    return {
        **row,
        "drafts": drafts.get("method", ""),
        "verification": drafts.get("rejection_sample_method", "standard") if drafts else "",
        "connectors": connectors,
    }


if __name__ == "__main__":
    main()
