"""A worker without torch that answers kernels with a row and collectives with times."""

import json
import sys

from measure.plans.wire import kernel_of

rank = int(sys.argv[sys.argv.index("--rank") + 1])
print(json.dumps({"ready": rank}), flush=True)
for line in sys.stdin:
    case = json.loads(line)
    if case["suite"] == "collectives":
        taking_part = any(rank in members for members in case["members"])
        times = [5.0, 6.0, 7.0] if taking_part else []
        print(json.dumps({"times_us": times, "bytes": case["bytes"]}), flush=True)
        continue
    kernel = kernel_of(case)
    known = {name: case[name] for name in ("case_id", "role", "op", "direction", "dtype", "state")}
    times = dict.fromkeys(("median_us", "p10_us", "p90_us", "min_us", "mean_us"), 5.0)
    more = {"repeats": 3, "std_us": 0.0, "shape": kernel.shape, "implementation": "made up"}
    print(json.dumps({"row": known | times | more | {"device": rank}}), flush=True)
