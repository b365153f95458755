#!/usr/bin/env bash
# Start kvshm's two processes of a node: the coordinator, and a keeper with the store behind it.
#
#     node.sh MASTER MEMORY
#
# MASTER: host:port of the store's master.  MEMORY: for the keeper's blocks, as 16G.  Needs
# kvshm-coordinator and kvshm on the PATH, and Mooncake's Python package beside kvshm.  Engines are
# started as always, with KVSHM_ENABLE=1.  Ends both with Ctrl-C or SIGTERM.
set -euo pipefail
[[ $# -eq 2 ]] || { sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2; }

folder=$(mktemp -d)
coordinator='' keeper=''
# The coordinator goes last: it removes what the keeper leaves in the run directory.
end() {
    set +e # of one that has ended already, too
    for pid in $keeper $coordinator; do
        kill "$pid" 2>/dev/null
        wait "$pid"
    done
    rm -r "$folder"
}
trap end EXIT
trap exit INT TERM

printf '{"master_server_address": "%s"}\n' "$1" >"$folder/mooncake.json"
kvshm-coordinator &
coordinator=$!
kvshm keeper --memory "$2" --store "$folder/mooncake.json" &
keeper=$!
wait -n # whichever ends first takes the other with it
