"""Everything Astra-Sim: its files, its runner, its log, and its timing rules as our own engine.

Astra-Sim itself is not here: users build it as its documentation says and point us at the binary.
The rules in these modules were read off astra-sim 518bd51 (chakra f37c2bb,
astra-network-analytical 599a047) and are tested against recorded runs of its binary.
"""

from simulate.astra.configs import Dimension, Files, Network, System
from simulate.astra.emit import Link, emit
from simulate.astra.log import AstraLog
from simulate.astra.manifest import Manifest
from simulate.astra.run import AstraResult, Binary, find_binary, identify, run
from simulate.astra.timing import Timing, simulate
from simulate.astra.traces import Trace, read_trace

__all__ = [
    "AstraLog",
    "AstraResult",
    "Binary",
    "Dimension",
    "Files",
    "Link",
    "Manifest",
    "Network",
    "System",
    "Timing",
    "Trace",
    "emit",
    "find_binary",
    "identify",
    "read_trace",
    "run",
    "simulate",
]
