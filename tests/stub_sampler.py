"""A sampler for tests of its handle: the first of a folder dies when told anything."""

import sys
from pathlib import Path

heard = Path(sys.argv[1]) / "heard"
first = not heard.exists()
heard.touch()
for line in sys.stdin:
    if first or line.endswith("die\n"):
        sys.exit(3)
    with heard.open("a") as file:
        file.write(line)
    print("careful" if "--careful" in sys.argv else "a note", flush=True)
