"""What the tasks of an emitted stage wait for where messages take turns, see `.messages`."""

import itertools

from simulate.step.pipeline_order import BACKWARD, FORWARD, Pass, order
from simulate.step.schedule import graph
from spec.parallelism import Parallelism

Event = tuple[str, Pass]  # "ran" a pass, "sent" its output, "received" its input


def turns(p: Parallelism, stage: int) -> dict[Event, Event]:
    """By event of a stage, the one that it waits for beside its input and the pass before.

    To run, an earlier pass's output to be sent; to send, the message before it in the same stream,
    sent or received; to receive, the pass that ends with asking for the input, or its output.
    """
    messages = graph(p.pp, p.microbatches, p.vpp, p.schedule, messages=True).arrays.messages
    assert messages is not None
    inputs, total = messages.inputs, messages.none // 2
    count = p.microbatches * p.vpp
    numbers = [itertools.count((2 * stage + way) * count) for way in (FORWARD, BACKWARD)]
    event_of: dict[int, Event] = {}
    waits: dict[Event, int] = {}
    for one in order(stage, p.pp, p.microbatches, p.vpp, p.schedule):
        number = next(numbers[one.way])
        event_of |= {number: ("ran", one), total + number: ("sent", one)}
        waits |= {("ran", one): inputs[2, number], ("sent", one): inputs[1, total + number]}
        source = int(inputs[1, number])
        if total <= source < messages.none:
            event_of[source] = "received", one
            waits["received", one] = inputs[2, source]
    return {event: event_of[at] for event, at in waits.items() if at in event_of}
