#!/bin/sh
# Measure this node's GPUs where jobs are started with torchrun.
#
#   examples/torchrun.sh SYSTEM [options of measure.run]
#
# One process is enough: it starts a worker for each GPU itself. Where your launcher insists on one
# process per GPU that is fine too: the first measures, the others end at once.
set -e
SYSTEM=$1
shift
torchrun --standalone --nnodes=1 --nproc-per-node=1 --module measure.run --system "$SYSTEM" "$@"
