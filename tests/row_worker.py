"""A worker without torch that answers every kernel case with a row, for tests of whole runs."""

import json
import sys

from spec.kernel import Kernel

rank = int(sys.argv[sys.argv.index("--rank") + 1])
print(json.dumps({"ready": rank}), flush=True)
for line in sys.stdin:
    case = json.loads(line)
    kernel = Kernel(case["op"], case["direction"], tuple(case["dims"]), case["dtype"])
    known = {name: case[name] for name in ("case_id", "role", "op", "direction", "dtype", "state")}
    times = dict.fromkeys(("median_us", "p10_us", "p90_us", "min_us", "mean_us"), 5.0)
    more = {"repeats": 3, "std_us": 0.0, "shape": kernel.shape, "implementation": "made up"}
    print(json.dumps({"row": known | times | more | {"device": rank}}), flush=True)
