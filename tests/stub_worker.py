"""A worker without torch, for tests of the pool: a case's op says how it behaves."""

import json
import os
import sys
import time

rank = sys.argv[sys.argv.index("--rank") + 1]
print(json.dumps({"ready": rank}), flush=True)
for line in sys.stdin:
    case = json.loads(line)
    if case.get("suite") == "choice":
        log = os.environ["NCCL_DEBUG_FILE"]
        told = [] if rank != "0" or case["bytes"] > 2**20 else ["ring", log]
        print(json.dumps({"choice": told}), flush=True)
        continue
    if case["op"] in ("die", f"die-{rank}"):
        print("segmentation fault, so to say", file=sys.stderr, flush=True)
        os._exit(3)
    if case["op"] == "hang":
        time.sleep(60)
    if case["op"] == "fail" or case["op"] == f"fail-{rank}":
        print(json.dumps({"error": "as asked"}), flush=True)
    else:
        told = {"rank": rank, "process": os.getpid(), "host_id": os.environ.get("NCCL_HOSTID")}
        print(json.dumps(told), flush=True)
