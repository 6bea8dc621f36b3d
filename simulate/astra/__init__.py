"""Everything Astra-Sim: its files, its runner, its log, and its timing rules as our own engine.

Astra-Sim itself is not here: users build it as its documentation says and point us at the binary.
The rules in these modules were read off astra-sim 518bd51 (chakra f37c2bb,
astra-network-analytical 599a047) and are tested against recorded runs of its binary.

    program = Program(axes, stages)                      # `.program`; ids ascend, deps before
    manifest = emit(program, Path("astra"), whole=False) # or whole=True: a trace for every rank
    binary = find_binary(flag)                           # None: say `absent()`
    result = run(Path("astra"), binary, timeout_s=600, progress=lambda done, ranks: ...)
    result.cycles[rank], result.step_ns                  # ns; WorkError where it did not end well

The manifest has `expected_ns`, our engine's answer under Astra-Sim's rules, which is the step_ns
that Astra-Sim then prints, and `breakdown_s` of it. Where `helpers` is above 0, the last so many
ranks are no GPUs (`expand.with_helpers`).

What `emit` wants of a Program beyond what its docstrings say:
- every communication has `time_ns`;
- every send has one recv in its peer stage, with the same tag and bytes (and the reverse);
- compute runs in id order and so do collectives (edges are added); sends only wait for `deps`;
- a recv has no cost: give it no deps, and make what uses its data depend on it;
- only all_reduce may span "pp"; tasks joined over it share their name.
"""

from simulate.astra.configs import Dimension, Files, Network, System
from simulate.astra.emit import emit
from simulate.astra.log import AstraLog
from simulate.astra.run import AstraResult, Binary, absent, find_binary, identify, run
from simulate.astra.timing import Timing, simulate
from simulate.astra.traces import Trace, read_trace

__all__ = [
    "AstraLog",
    "AstraResult",
    "Binary",
    "Dimension",
    "Files",
    "Network",
    "System",
    "Timing",
    "Trace",
    "absent",
    "emit",
    "find_binary",
    "identify",
    "read_trace",
    "run",
    "simulate",
]
