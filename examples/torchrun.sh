#!/bin/sh
# Measure this node's GPUs, or those of several nodes, where jobs are started with torchrun.
#
#   examples/torchrun.sh SYSTEM [options of measure.run]
#   NODES=8 NODE=3 MASTER=node-0 examples/torchrun.sh SYSTEM ...     the same on each, NODE from 0 on
#
# One process on each node is enough: it starts a worker for each GPU itself. Where your launcher
# insists on one process per GPU that is fine too: the others end at once. Node 0 writes the results.
set -e
: "${1:?name the system, such as 8x-h200}"
SYSTEM=$1
shift
if [ "${NODES:-1}" -gt 1 ]; then
    WHERE="--node-rank=$NODE --master-addr=$MASTER --master-port=${PORT:-29500}"
else
    WHERE=--standalone
fi
# shellcheck disable=SC2086 # several words
torchrun $WHERE --nnodes="${NODES:-1}" --nproc-per-node=1 \
    --module measure.run --system "$SYSTEM" "$@"
