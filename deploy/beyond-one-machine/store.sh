#!/usr/bin/env bash
# Start a Mooncake Store on this machine: its master, and a process that gives the store memory.
#
#     store.sh ADDRESS SIZE
#
# ADDRESS: of this machine, as the nodes reach it.  SIZE: bytes of memory, as 64GB.  Needs
# mooncake_master and mooncake_client on the PATH (pip install mooncake-transfer-engine, or
# mooncake-transfer-engine-non-cuda on a machine without CUDA).  Ends both with Ctrl-C or SIGTERM.
set -euo pipefail
[[ $# -eq 2 ]] || { sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2; }
address=$1 size=$2

# The port that nodes are given, one of the master's for people and Prometheus, and one of the
# process with the memory.
master_port=${MASTER_PORT:-50051} metrics_port=${METRICS_PORT:-9003} memory_port=${MEMORY_PORT:-50052}

master='' client=''
end() {
    set +e # of one that has ended already, too
    for pid in $client $master; do
        kill "$pid" 2>/dev/null
        wait "$pid"
    done
}
trap end EXIT
trap exit INT TERM

# Wait until a process serves its port.
serves() {
    until (: </dev/tcp/"$address"/"$2") 2>/dev/null; do
        kill -0 "$1" || exit 1
        sleep 0.2
    done
}

mooncake_master --rpc_address="$address" --rpc_port="$master_port" \
    --metrics_host="$address" --metrics_port="$metrics_port" --logtostderr &
master=$!
serves "$master" "$master_port"

# P2PHANDSHAKE: clients find each other without a metadata service.
mooncake_client --host="$address" --port="$memory_port" \
    --master_server_address="$address:$master_port" \
    --metadata_server=P2PHANDSHAKE --protocol=tcp --global_segment_size="$size" --logtostderr &
client=$!
serves "$client" "$memory_port"
echo "store at $address:$master_port"
wait -n # whichever ends first takes the other with it
