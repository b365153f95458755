#!/usr/bin/env bash
# Start a coordinator and two engines, send the same long prompt to both, show what is shared.
#
#     examples/two_engines.sh [MODEL]
#
# Without MODEL a small one with random weights is written first.  Needs vllm, kvshm and curl on
# the PATH; PORT_A and PORT_B choose other ports, LOGS a folder where the logs stay.
set -euo pipefail

examples=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d /tmp/kv-XXXXXX)
logs=${LOGS:-$work}
ports=("${PORT_A:-8001}" "${PORT_B:-8002}")
pids=()

# A run directory and a namespace of our own: nothing here meets engines that run already.
export KVSHM_RUN_DIR=$work/run KVSHM_NAMESPACE=two-engines-$$ KVSHM_MIN_PREFIX_TOKENS=0

stop() {
    for pid in "$@"; do kill "$pid" 2>/dev/null || true; done
    for pid in "$@"; do wait "$pid" || true; done
}

# The coordinator goes last: it removes what the engines leave in the run directory.
cleanup() {
    stop "${pids[@]:1}"
    stop "${pids[@]:0:1}"
    rm -rf "$work"
}
trap cleanup EXIT

# Wait until an engine answers; its log says why if it ends instead.
await() {
    local port=$1 pid=$2
    until curl --silent --fail --output /dev/null "http://127.0.0.1:$port/health"; do
        if ! kill -0 "$pid" 2>/dev/null; then
            tail -n 30 "$logs/engine-$port.log" >&2
            exit 1
        fi
        sleep 1
    done
}

ask() {
    printf '{"model": "m", "prompt": "%s", "max_tokens": 8, "temperature": 0}' "$prompt" |
        curl --silent --fail --header 'Content-Type: application/json' --data @- \
            --output /dev/null --write-out "engine on port $1: %{time_total} s\n" \
            "http://127.0.0.1:$1/v1/completions"
}

model=${1:-$work/model}
[[ $# -gt 0 ]] || python "$examples/tiny_model.py" "$model" >/dev/null

kvshm-coordinator 2>"$logs/coordinator.log" &
pids+=($!)
# -P: in a clone Python would else find kvshm's sources, which are not built.
# Of the memory, a GPU's or the CPU's, each engine takes nearly all unless its part is given.
for port in "${ports[@]}"; do
    KVSHM_ENABLE=1 python -P -m vllm.entrypoints.openai.api_server --model "$model" \
        --served-model-name m --host 127.0.0.1 --port "$port" --dtype bfloat16 --enforce-eager \
        --gpu-memory-utilization 0.3 --max-model-len 4096 >"$logs/engine-$port.log" 2>&1 &
    pids+=($!)
done
await "${ports[0]}" "${pids[1]}"
await "${ports[1]}" "${pids[2]}"

prompt=$(printf 'the same long beginning %.0s' {1..200})
ask "${ports[0]}"
sleep 1 # the second engine has heard of the first one's blocks by then
ask "${ports[1]}"

# What the second did not prefill, by vLLM's own count, and which engine holds what.
curl --silent "http://127.0.0.1:${ports[1]}/metrics" | grep '^vllm:kvshm_imported_tokens_total'
kvshm dump --namespace "$KVSHM_NAMESPACE"
