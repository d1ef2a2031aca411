#!/usr/bin/env bash
# What `vllm-disagg up` does, by hand: by_hand.sh MODEL.  Serves on 127.0.0.1:8000 until Ctrl-C.
# On several machines: copy the key file, and add "host": "THIS MACHINE'S ADDRESS" to the extra config of each engine.
set -euo pipefail
model=${1:?MODEL}
export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1} # GiB of each engine; vLLM would take nearly all memory for one
folder=$(mktemp -d)
trap 'rm -rf "$folder"; kill $(jobs -p) 2>/dev/null; wait' EXIT
key=$folder/fleet.key
vllm-disagg key "$key"
engine() { # port, role, core or GPU
  VLLM_CPU_OMP_THREADS_BIND=$3 CUDA_VISIBLE_DEVICES=$3 vllm serve "$model" --host 127.0.0.1 --port "$1" --kv-transfer-config "{
    \"kv_connector\": \"DisaggConnector\", \"kv_role\": \"$2\", \"kv_load_failure_policy\": \"recompute\",
    \"kv_connector_extra_config\": {\"key_file\": \"$key\"}}" --disable-access-log-for-endpoints=/health,/metrics &
}
engine 8100 kv_producer 0
engine 8200 kv_consumer 1
vllm-disagg proxy --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200 --key-file "$key" # engines may come up later
