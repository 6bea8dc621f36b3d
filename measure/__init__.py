"""Measures kernels, collectives and training steps on the hardware at hand, with telemetry.

Imports `spec` and nothing else of this project; the result set it writes is all that others read.
Its folders build on one another in this order (`tests/test_arrows.py` holds them to it):

    devices    one file per vendor; telemetry: the sampler
    hosts      the hosts of a run, and processes led on them
    timed      operations, and how a call is timed
    megatron   all that knows Megatron-Core; training: its steps, a case in processes of its own
    store      result sets
    plans      what to measure, as data; suites: what each measures; checks: are sensors true
    logs       output of other tools

A run goes `run` (the command) -> `wanted` (its cases) -> `campaign` -> `worker`, one per device.
"""

from spec.quiet import quiet_interrupt

quiet_interrupt()
