#!/bin/sh
# A machine without a GPU as 2, 4 and 8 hosts; the steps of 8 are forecast from what 2 and 4 measured.
#
#   examples/emulated-hosts.sh [RESULTS] [MBIT] [SYSTEM] [CORES]
#
# Needs root and iproute2; about 45 minutes on two cores; less with CORES=1, a whole core for each
# host, where there are as many and their clocks are steady. A run that turns out invalid (something
# else used the cores) ends it: repeat. What is there is not measured again, a forecast not replaced.
set -e
RESULTS=${1:-results} MBIT=${2:-200}
SYSTEM=${3:-netns-${MBIT}mbit} CORES=${4:-0.2}
FORECASTS=$RESULTS/$SYSTEM/forecasts
PYTHON=${PYTHON:-python3}

hosts() { # HOSTS, options
    HOSTS=$1
    shift
    $PYTHON -m measure.run --emulate-nodes "$HOSTS" --link-mbit "$MBIT" --node-cores "$CORES" "$@"
}

measure() { # HOSTS, options
    hosts "$@" --out "$RESULTS" --system "$SYSTEM" --progress
}

mkdir -p "$FORECASTS"
PARTS=kernels,host,collectives
if [ ! -e "$FORECASTS/hosts-4.json" ]; then
    measure 2 --suite "$PARTS,training"
    measure 4 --suite "$PARTS"
fi
for HOSTS in 4 8; do
    PLAN=$FORECASTS/hosts-$HOSTS.csv SEALED=$FORECASTS/hosts-$HOSTS.json
    if [ ! -e "$SEALED" ]; then
        $PYTHON -m calibrate.fit "$RESULTS" --system "$SYSTEM"
        hosts "$HOSTS" --write-plan "$PLAN"
        gzip -9nc "$RESULTS/$SYSTEM/calibration.json" >"${SEALED%.json}-calibration.json.gz"
        $PYTHON -m simulate.validate predict "$PLAN" --out "$SEALED" \
            --results "$RESULTS" --system "$SYSTEM"
    fi
    measure "$HOSTS" --suite training --plan "$PLAN"
    $PYTHON -m simulate.validate compare "$SEALED" "$RESULTS" --json "${SEALED%.json}-judged.json"
done
measure 8 --suite "$PARTS"
$PYTHON -m calibrate.fit "$RESULTS" --system "$SYSTEM"
