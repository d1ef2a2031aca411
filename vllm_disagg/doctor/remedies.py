"""What to do about faults that other parts of this project describe in words."""

from __future__ import annotations

from ..protocol.reasons import Reason

SAME_FILES = "serve the same files or --revision on both, and restart them"
# By the fact of a KV layout that differs (`kv_connectors/compatibility.py`).
OF_FACTS = {
    "architecture": "serve one model on both, with the same plugins of vLLM (VLLM_PLUGINS)",
    "model config": f"{SAME_FILES}, with one version of transformers",
    "weights": SAME_FILES,
    "layers": SAME_FILES,
    "positions": "start both with the same --max-model-len",
    "images": "start both with the same flags for images and the same processor files, and install"
    " torchvision on both or on neither; with --trust-remote-code also the same *.py files",
    "dtype": "start both with the same --dtype",
    "KV cache dtype": "start both with the same --kv-cache-dtype",
    "quantization": "start both with the same --quantization, kernels and variables of it,"
    " on GPUs that compute its formats alike",
    "code of layers": "start both with or without --enforce-eager, and with the same"
    " --compilation-config and flags that choose kernels",
    "quantized layers": "run both on CPUs with AMX, or both without, and install the same packages",
    "load format": "start both with the same --load-format",
    "LoRA": "start both with the same flags for LoRA",
    "VLLM_BATCH_INVARIANT": "set the variable alike in both environments; where it does not hold in"
    " all layers, the engine's log names the remedy",
    "compress": "set compress alike in kv_connector_extra_config",
    "transfer protocol": "install one version of vllm-disagg for both",
    "KV of a token": "use one attention backend, --kv-cache-dtype and VLLM_KV_CACHE_LAYOUT",
}
ANY_FACT = "start both with the same settings"

RESTART = "read the end of its log, and restart it"
START = "start it, check its URL, and open its port"
KEY_OR_CONNECTOR = (
    "give it DisaggConnector with the key_file of this fleet (compare fingerprints:"
    " `vllm-disagg doctor --key-file FILE` on each machine), and look for"
    ' "KV transfers are off" in its log'
)
# By a part of the proxy's words on an instance that is not used; the first that is contained.
OF_INSTANCES = {
    "refuses connections": START,
    "no connection within": START,
    "network brings no connection": "look at the routes and firewalls between the proxy and it",
    " answered 401": "start the proxy with the instances' --api-key, and look for a line break"
    " at the end of their VLLM_API_KEY, with which they accept no key",
    "a proxy of vllm-disagg answers there": "give the proxy the URL of an engine in its place",
    "does not answer": RESTART,
    "is silent": "its process is frozen or its machine is gone: look there, and restart it",
    "makes no steps": RESTART,
    "engine died": RESTART,
    "serves no KV transfers": KEY_OR_CONNECTOR,
    "is given as": "exchange its flag at the proxy, or its kv_role",
    "data parallel rank": "give the proxy the URL in that form",
    "rests after failures": "read its log at the time of the last failure",
    "do not fit": "the lines of its pairs have the fields",
    "not probed yet": "wait some seconds and repeat",
}
# By the reason of a failed load.
OF_LOADS = {
    Reason.PEER_TIMEOUT: "open P's control port for D's machine, and look whether P is frozen",
    Reason.TRANSFER_STALLED: "open P's data port for D's machine, and look at the network",
    Reason.ENGINE_STALLED: "P's engine makes no steps: read its log, and restart it",
    Reason.PROMPT_MISMATCH: "compare tokenizers, chat templates and versions of vLLM",
    Reason.UNKNOWN_TRANSFER: "repeat; P was restarted, or had no room",
    Reason.BLOCKS_REVOKED: "repeat; P had no free KV blocks",
    Reason.BLOCKS_RELEASED: "repeat; P released the blocks before all bytes were there",
    Reason.CORRUPT: "look at the network: pieces came with wrong checksums",
    Reason.KV_MISMATCH: "do not use this pair, and report it with the logs of both",
    Reason.INTERNAL_ERROR: "restart D, and report it with its log",
    Reason.CANCELLED: "repeat; the request was cancelled",
}


def of_fact(words: str) -> str:
    """Returns the remedy for a difference, whose words begin with the fact's name."""
    for fact, remedy in OF_FACTS.items():
        if words.startswith(f"{fact} is "):
            return remedy
    return ANY_FACT


def of_silence(reason: str) -> str:
    """Returns the remedy for a server that does not answer."""
    if "TLS" in reason:
        return "give the name in its certificate, and trust its issuer: SSL_CERT_FILE=PATH"
    return START


def of_instance(words: str) -> str:
    """Returns the remedy for an instance that the proxy does not use."""
    for part, remedy in OF_INSTANCES.items():
        if part in words:
            return remedy
    return RESTART


def of_load(reason: str) -> str:
    """Returns the remedy for a failed load; `reason` may be one of another version."""
    for known, remedy in OF_LOADS.items():
        if known.value == reason:
            return remedy
    return "read the trace of the transfer in D's log"
