"""The graph of a pipeline whose messages take turns, for messages longer than passes.

GPipe and ZB-H1 (`in_line`): a stage sends and goes on, and messages over a boundary follow one
another in each direction.

Interleaved 1F1B (`with_messages`) is what Megatron-Core 0.16.1 does with `overlap_p2p_comm`
(`schedules.py`, `forward_backward_pipelining_with_interleaving`; `p2p_communication.py`,
`_p2p_ops`):

- After each pass a stage sends its output and asks for the next input of the same way: that of the
  next pass in warm-up and cool-down, of the next but one where forward and backward passes take
  turns. Stages that are late to ask hold up what buffers do not hold (`simulate.cost.exchange`).
- NCCL carries messages of one stream one after another. Between two stages each direction has its
  own (one of the pipeline's group, one of the world's); among more each pair of stages has one for
  both directions (ProcessGroupNCCL keeps one per pair of ranks).
- In warm-up and cool-down a pass waits until the output of the pass before is sent. Where ways take
  turns it waits for the last message but one of its way (`send_next_wait_handle.wait()` behind the
  next send): that of three passes before. With one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1)
  kernels start as they were issued, behind a message that waits for the one before it: not counted,
  as that one mostly has the next input, or is three passes old.

A message's row is when its sender is done with it. Half of what buffers hold of it is taken to be
at the sender's end, so it arrives by that much later. By the suite `late` (`sender_us`) more lies
there over a shaped link, less over the loopback device; docs/calibration.md says how much, and that
steps are simulated no better with it.
"""

import itertools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.intp]
Mask = NDArray[np.bool_]


class Passes(NamedTuple):
    """All passes of a pipeline; `len(sender)` is the number of none."""

    order: Rows  # (stages, passes of a stage), in the order they run
    sender: Rows  # of each pass, the one whose output it needs
    kinds: Rows  # of each pass
    over: Rows  # of each pass, the boundary of stages that its input comes over; -1: no other stage
    exchanging: Mask  # as `order`: whether its input was asked for by the pass right before
    waiting: Mask  # as `order`: whether it waits until that one's output is sent


class Messages(NamedTuple):
    """Passes and messages; these have the numbers of their senders, behind all passes."""

    lanes: Rows  # (stages and streams, longest): what runs one after another; `none` + 1 fills up
    inputs: Rows  # (2 or 3, passes and messages): what each waits for
    times: Rows  # likewise: the kinds of times to add, as `simulate.step.timeline` lists them

    @property
    def none(self) -> int:
        """The number of nothing to wait for."""
        return int(self.inputs.shape[1])


def with_messages(passes: Passes, kinds: int) -> Messages:
    """The graph of interleaved passes and messages; `kinds` of passes there are."""
    order, total = passes.order, passes.sender.size
    stages, count = order.shape
    none = 2 * total
    earlier = [np.full_like(order, none) for _ in range(4)]
    for back, one in enumerate(earlier):
        one[:, back:] = order[:, : count - back]
    place = _places(passes)
    receiver = np.flatnonzero(passes.over >= 0)
    sender, over = passes.sender[receiver], passes.over[receiver]
    message = total + sender
    sends = np.zeros(none + 1, dtype=bool)
    sends[sender] = True
    asked = np.empty(total, dtype=np.intp)
    asked[order] = np.where(passes.exchanging, earlier[1], earlier[2])
    asked = asked[receiver]

    stream, issued = sender // count, 2 * place[sender]
    if stages > 2:  # as the stage before the boundary issues: sends, then asks for what comes back
        stream, issued = over, np.where(over == stream, issued, 2 * place[asked] + 1)
    found = _in_streams(passes, kinds, stream, issued)

    # besides, passes wait for what was sent before, and messages until they are asked for
    waits = np.full(none, none)
    last = np.where(passes.waiting, earlier[1], earlier[3])
    waits[order] = np.where(sends[last], total + last, none)
    # the first backward pass's input is asked for when the last forward pass's output is sent
    after = (receiver % count == count // 2) & sends[asked]
    waits[message] = np.where(after, total + asked, asked)
    late = np.resize(passes.kinds, none)
    late[message] = 2 * kinds + 2 * stages + over
    return found._replace(
        inputs=np.vstack([found.inputs, waits]), times=np.vstack([found.times, late])
    )


def in_line(passes: Passes, kinds: int) -> Messages:
    """As `with_messages`, where no stage waits for what it sends, nor messages for who asks."""
    receiver = np.flatnonzero(passes.over >= 0)
    sender, over = passes.sender[receiver], passes.over[receiver]
    backward = sender // passes.order.shape[1] > over  # by the stage that sends
    return _in_streams(passes, kinds, 2 * over + backward, _places(passes)[sender])


def _places(passes: Passes) -> Rows:
    """By pass, its place in its stage's order; -1 behind all of them."""
    place = np.full(2 * passes.sender.size + 1, -1)
    place[passes.order] = np.arange(passes.order.shape[1])
    return place


def _in_streams(passes: Passes, kinds: int, stream: Rows, issued: Rows) -> Messages:
    """Each pass behind the one before it and its input, each message behind its stream's last one.

    `stream` and `issued` are of each message: its stream, and its place in that.
    """
    order, total = passes.order, passes.sender.size
    stages, count = order.shape
    none = 2 * total
    receiver = np.flatnonzero(passes.over >= 0)
    sender, over = passes.sender[receiver], passes.over[receiver]
    message = total + sender

    by_stream = np.lexsort((issued, stream))
    lengths = np.bincount(stream, minlength=stages)
    lanes = np.full((stages + len(lengths), max(count, lengths.max())), none + 1)
    lanes[:stages, :count] = order
    begins = itertools.accumulate(lengths, initial=0)
    for lane, length, begin in zip(lanes[stages:], lengths, begins, strict=False):
        lane[:length] = message[by_stream[begin : begin + length]]
    before = np.full(none + 2, none)
    before[lanes[:, 1:]] = lanes[:, :-1]

    inputs = np.full((2, none), none)
    inputs[0, order] = before[order]
    inputs[1, :total] = np.where(passes.sender < total, passes.sender, none)
    inputs[1, receiver] = message
    inputs[:, message] = sender, before[message]
    times = np.tile(np.resize(passes.kinds, none), (2, 1))
    times[1, receiver] += kinds
    sent, taken = (2 * kinds + part * stages + over for part in range(2))
    times[:, message] = sent, np.where(before[message] < none, taken, sent)
    return Messages(lanes, inputs, times)
