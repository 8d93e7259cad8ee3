"""The loopback transport itself: strict order, no buffers, lanes, and a delay that finds out careless senders."""

import threading
import time

import pytest
import torch

from fastpipe import Pipeline, lower, make_schedule
from fastpipe.errors import ProgramError
from fastpipe.program import ChannelKind
from fastpipe.runtime.common.failure import FailureError
from fastpipe.runtime.transport.transport import Loopback, Message
from tests.patience import PATIENCE
from tests.runtime.models import CASES

PROGRAM = lower(make_schedule("1f1b", num_ranks=2, num_microbatches=3))
UP = PROGRAM.channels.index((0, 1, ChannelKind.ACTIVATION))
DOWN = PROGRAM.channels.index((1, 0, ChannelKind.GRADIENT))


def message(microbatch: int, kind: ChannelKind = ChannelKind.ACTIVATION) -> Message:
    return Message(kind, 1 if kind is ChannelKind.ACTIVATION else 0, microbatch)


def ends(transport: Loopback, timeout: float = PATIENCE):
    both = [transport.endpoint(PROGRAM, rank, timeout) for rank in range(2)]
    for end in both:
        end.begin(0, True)
    return both


def test_first_in_first_out_and_nothing_is_buffered() -> None:
    sender, receiver = ends(Loopback())
    sent = [torch.full((3,), float(i)) for i in range(3)]
    for i, tensor in enumerate(sent):
        sender.send(message(i), UP, i, (tensor,))
    # nobody has received: what is sent is still read from the sender's memory
    sent[2].fill_(7.0)
    for i in range(3):
        receiver.post_recv(message(i), UP, i)
    found = [receiver.wait_recv(UP, i) for i in range(3)]
    assert [float(tensors[0][0]) for tensors in found if tensors is not None] == [0.0, 1.0, 7.0]


def test_a_delay_finds_out_who_overwrites_too_early() -> None:
    sender, receiver = ends(Loopback(delay=0.05))
    tensor = torch.zeros(3)
    receiver.post_recv(message(0), UP, 0)
    sender.send(message(0), UP, 0, (tensor,))
    tensor.fill_(1.0)  # before wait_send: a mistake
    (got,) = receiver.wait_recv(UP, 0) or ()
    sender.wait_send(0)
    assert got.tolist() == [1.0, 1.0, 1.0]


def test_a_delayed_send_wakes_a_receiver_that_waits_already() -> None:
    """The sender goes on to something else: nobody but the receiver is there to see the delay end."""
    sender, receiver = ends(Loopback(delay=0.05))
    receiver.post_recv(message(0), UP, 0)
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(receiver.wait_recv(UP, 0)))
    thread.start()
    time.sleep(0.02)
    sender.send(message(0), UP, 0, (torch.zeros(1),))
    thread.join(PATIENCE)
    assert not thread.is_alive() and found


def test_what_is_not_the_next_message_is_noticed() -> None:
    sender, receiver = ends(Loopback())
    sender.send(message(1), UP, 0, (torch.zeros(1),))
    with pytest.raises(AssertionError, match="microbatch 1, .* stage 0, microbatch 0"):
        receiver.post_recv(message(0), UP, 0)


def test_a_lane_for_a_pair_of_ranks_holds_up_what_comes_after() -> None:
    """In a lane of a pair both ends take the same operation; with directed lanes each direction is by itself."""
    gradient = message(0, ChannelKind.GRADIENT)
    for lanes in ("directed", "pair"):
        sender, receiver = ends(Loopback(lanes=lanes), timeout=0.1)
        sender.send(message(0), UP, 0, (torch.zeros(1),))
        sender.post_recv(gradient, DOWN, 0)
        receiver.send(gradient, DOWN, 0, (torch.zeros(1),))
        if lanes == "directed":
            assert sender.wait_recv(DOWN, 0) is not None
        else:
            with pytest.raises(FailureError, match="rank 1 did not answer"):
                sender.wait_recv(DOWN, 0)


def test_a_schedule_that_would_hang_is_refused(executor: str) -> None:
    layers = CASES["plain"].layers(8)
    options = {"num_ranks": 4, "executor": executor}
    with pytest.raises(ProgramError, match="can hang"):
        Pipeline(layers, "dualpipev", 8, CASES["plain"].loss_fn, transport=Loopback(lanes="pair"), **options)
    Pipeline(layers, "dualpipev", 8, CASES["plain"].loss_fn, transport=Loopback(lanes="directed"), **options)


@pytest.mark.parametrize("wrong", [{"lanes": "both"}, {"delay": -1.0}])
def test_bad_options(wrong: dict) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} = "):
        Loopback(**wrong)
