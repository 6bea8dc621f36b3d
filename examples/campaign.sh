#!/bin/sh
# One visit to a machine, in the order that keeps a forecast honest: kernels and collectives first, a
# calibration from them, a sealed forecast of the training steps, and only then the steps.
#
#   examples/campaign.sh SYSTEM PLAN.csv [RESULTS] [MINUTES for the training steps]
#
# PLAN.csv has the configuration columns of training.csv; `python -m measure.run --write-plan` makes
# one. Run it again to continue: what is finished is kept, and a forecast is never replaced.
set -e
: "${1:?name the system, such as my-system}" "${2:?name the plan, such as plan.csv}"
SYSTEM=$1 PLAN=$2 RESULTS=${3:-results} MINUTES=${4:-60}
NAME=$(basename "$PLAN" .csv)
SEALED=$RESULTS/$SYSTEM/forecasts/$NAME.json
PYTHON=${PYTHON:-python3}

# the run folder of a suite, where an earlier visit left one unfinished
unfinished() {
    grep -ls '"status": "\(running\|partial\)"' "$RESULTS/$SYSTEM"/*/manifest.json 2>/dev/null |
        xargs -r grep -l "\"$1\"" | tail -n 1 | xargs -r dirname | xargs -r basename
}

predict() { # more options
    $PYTHON -m simulate.validate predict "$PLAN" --out "$SEALED" \
        --results "$RESULTS" --system "$SYSTEM" "$@"
}

if [ ! -e "$SEALED" ]; then
    RUN=$(unfinished kernels)
    $PYTHON -m measure.run --suite kernels,host,collectives,interference,behind,queued,telemetry,turns,pulses --plan "$PLAN" \
        --out "$RESULTS" --system "$SYSTEM" --progress ${RUN:+--resume "$RUN"}
    $PYTHON -m calibrate.fit "$RESULTS" --system "$SYSTEM"
    # for the devices just measured, where a power cap told them apart
    predict --same-devices || { echo "so the forecast is for any devices of their kind" >&2; predict; }
fi
RUN=$(unfinished training)
$PYTHON -m measure.run --suite training --plan "$PLAN" --budget "$MINUTES" \
    --out "$RESULTS" --system "$SYSTEM" --progress ${RUN:+--resume "$RUN"}
$PYTHON -m simulate.validate compare "$SEALED" "$RESULTS" --json "${SEALED%.json}-judged.json"
