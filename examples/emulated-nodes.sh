#!/bin/sh
# One host's GPUs as several nodes, forecast before measured: collectives across the emulated nodes,
# a calibration from them and the host's kernels, a sealed forecast of the training steps, the steps.
#
#   examples/emulated-nodes.sh NODES HOST-SYSTEM SYSTEM [RESULTS]
#
# such as `2 4x-h200 4x-h200-2x2`. HOST-SYSTEM has been measured before (`python -m measure.run`),
# best on the same visit. A plan at RESULTS/SYSTEM/forecasts/plan.csv is used where there is one,
# else the default one is written; a forecast is never replaced.
set -e
: "${1:?say how many nodes}" "${2:?name the system of the host}" "${3:?name the system of the nodes}"
NODES=$1 HOST=$2 SYSTEM=$3 RESULTS=${4:-results}
FORECASTS=$RESULTS/$SYSTEM/forecasts
PLAN=$FORECASTS/plan.csv SEALED=$FORECASTS/plan.json
PYTHON=${PYTHON:-python3}

predict() { # more options
    $PYTHON -m simulate.validate predict "$PLAN" --out "$SEALED" \
        --results "$RESULTS" --system "$SYSTEM" "$@"
}

mkdir -p "$FORECASTS"
[ -e "$PLAN" ] || $PYTHON -m measure.run --emulate-nodes "$NODES" --write-plan "$PLAN"
if [ ! -e "$SEALED" ]; then
    $PYTHON -m measure.run --emulate-nodes "$NODES" --suite collectives \
        --out "$RESULTS" --system "$SYSTEM" --progress
    $PYTHON -m calibrate.fit "$RESULTS" --system "$SYSTEM" --kernels-from "$HOST"
    # for the devices of the host's kernels, where those are this visit's and a power cap told them
    # apart
    predict --same-devices || { echo "so the forecast is for any devices of their kind" >&2; predict; }
fi
$PYTHON -m measure.run --emulate-nodes "$NODES" --suite training --plan "$PLAN" \
    --out "$RESULTS" --system "$SYSTEM" --progress
$PYTHON -m simulate.validate compare "$SEALED" "$RESULTS" --json "${SEALED%.json}-judged.json"
