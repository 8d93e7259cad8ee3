"""What the proof of a program accepts and refuses, one fault at a time, and how the error reads."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import fastpipe
from fastpipe import Channel, ChannelKind, Instruction, Op, Program, ProgramError, Schedule, validate_program
from tests.unit.planning import hand, random_schedules, rebuilt, small_schedules, with_columns

pytestmark = pytest.mark.filterwarnings("ignore:.*come in another order")


@pytest.fixture
def program() -> Program:
    """rank 0: POST_RECV 0F0 SEND WAIT_RECV WAIT_SEND 0B0 FREE; rank 1: POST WAIT 1F0 1B0 SEND FREE WAIT_SEND"""
    return fastpipe.lower(hand(["0F0 0B0", "1F0 1B0"], [0, 1], 1))


def refused(program: Program, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        validate_program(program)


def test_dualpipev_needs_directed_lanes() -> None:
    program = fastpipe.lower(fastpipe.make_schedule("dualpipev", num_ranks=4, num_microbatches=8))
    validate_program(program, lanes="directed")
    with pytest.raises(ProgramError, match="wait in a cycle: rank .* waits for rank"):
        validate_program(program, lanes="pair")


def test_one_lane_a_pair_is_enough_where_both_ends_name_their_transfers_in_one_order() -> None:
    gpipe = fastpipe.make_schedule("gpipe", num_ranks=4, num_microbatches=8)
    validate_program(fastpipe.lower(gpipe, recv_lookahead=0), lanes="pair")
    # rank 0 sends its second activation before it receives a gradient, rank 1 the other way round
    orders = fastpipe.make_schedule("1f1b", num_ranks=4, num_microbatches=8)
    with pytest.raises(ProgramError, match="ranks wait in a cycle"):
        validate_program(fastpipe.lower(orders, recv_lookahead=0), lanes="pair")


def test_what_is_lowered_for_coalesced_lanes_cannot_hang_in_them() -> None:
    for schedule in small_schedules():
        validate_program(fastpipe.lower(schedule, coalesce=True), lanes="coalesced")
    ordinary = fastpipe.lower(fastpipe.make_schedule("dualpipev", num_ranks=4, num_microbatches=8))
    with pytest.raises(ProgramError, match="wait in a cycle: rank .* waits for rank"):
        validate_program(ordinary, lanes="coalesced")


@given(random_schedules())
@settings(max_examples=60, deadline=None)
def test_so_it_is_with_any_order(schedule: Schedule) -> None:
    validate_program(fastpipe.lower(schedule, coalesce=True), lanes="coalesced")


def test_lanes() -> None:
    program = fastpipe.lower(fastpipe.make_schedule("1f1b", num_ranks=2, num_microbatches=2))
    validate_program(program, lanes=[3, 9])
    with pytest.raises(ValueError, match="lanes = 'each': .*'directed', 'pair'"):
        validate_program(program, lanes="each")
    with pytest.raises(ValueError, match="lanes names 1 channels of 2"):
        validate_program(program, lanes=[0])


@pytest.mark.parametrize("schedule", small_schedules()[1::2], ids=repr)
def test_every_instruction_but_those_on_weights_is_needed(schedule: Schedule) -> None:
    program = fastpipe.lower(schedule)
    for rank in (0, program.num_ranks - 1):
        for drop in Op:
            position = next((p for p, i in enumerate(program[rank]) if i.op is drop), None)
            if position is None:
                continue
            mutated = rebuilt(program, rank, lambda rows, p=position: rows.pop(p))
            if drop in (Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD):
                validate_program(mutated)  # they move no message
            else:
                refused(mutated, r"rank \d")


Rows = list[Instruction]


def moved(rows: Rows, source: int, to: int) -> None:
    rows.insert(to, rows.pop(source))


def without_sends(rows: Rows) -> None:
    rows[:] = [i for i in rows if i.op not in (Op.SEND, Op.WAIT_SEND)]


def with_slot_0(rows: Rows, *ops: Op) -> None:
    rows[:] = [i._replace(slot=0) if i.op in ops else i for i in rows]


def swap_sends(rows: Rows) -> None:
    first, second = (p for p, i in enumerate(rows) if i.op is Op.SEND)
    moved(rows, first, second)


FAULTS: dict[str, tuple[int, Callable[[Rows], Any], str]] = {
    "dropped post": (
        1,
        lambda rows: rows.pop(0),
        "rank 1, position 0, WAIT_RECV .* microbatch 0, peer 0.*: no receive of the activation for stage 1",
    ),
    "dropped wait": (1, lambda rows: rows.pop(1), "rank 1, position 1, F +1F0: the activation .* not arrived"),
    "dropped send": (0, without_sends, "rank 0, position 1: the activation for stage 1 .* never sent"),
    "dropped wait for a send": (0, lambda rows: rows.pop(4), "rank 0, end of the program: send 0 .* never waited for"),
    "dropped free": (0, lambda rows: rows.pop(6), "rank 0, end of the program: slot 0 still holds the gradient"),
    "wait twice": (0, lambda rows: rows.insert(4, rows[3]), "rank 0, position 4, WAIT_RECV .*already waited for"),
    "wait for a send twice": (0, lambda rows: rows.insert(5, rows[4]), "rank 0, position 5, WAIT_SEND .*not under way"),
    "wait before its send": (0, lambda rows: moved(rows, 4, 2), "rank 0, position 2, WAIT_SEND .*send 0 is not under"),
    "compute twice": (0, lambda rows: rows.insert(2, rows[1]), "rank 0, position 2, F +0F0: .*already done"),
    "send twice": (
        0,
        lambda rows: rows.insert(3, rows[2]._replace(slot=1)),
        "rank 0, position 3, SEND .*not there to hand on",
    ),
    "free too early": (1, lambda rows: moved(rows, 5, 3), "rank 1, position 3, FREE .*stage 1 still reads it"),
    "free before the message": (1, lambda rows: moved(rows, 5, 1), "rank 1, position 1, FREE .*not waited for"),
    "wait in another slot": (
        1,
        lambda rows: rows.__setitem__(1, rows[1]._replace(slot=1)),
        "rank 1, position 1, WAIT_RECV .*is posted to slot 1",
    ),
}
"""What is wrong with one rank's instructions of `program`, and what is said of it."""


@pytest.mark.parametrize(("rank", "change", "message"), FAULTS.values(), ids=FAULTS)
def test_one_fault(program: Program, rank: int, change: Callable[[Rows], Any], message: str) -> None:
    refused(rebuilt(program, rank, change), message)


@pytest.mark.parametrize(
    ("rank", "change", "message"),
    [
        (
            1,
            lambda rows: with_slot_0(rows, Op.POST_RECV, Op.WAIT_RECV, Op.FREE),
            r"rank 1, position \d, POST_RECV .*slot 0 still holds the activation",
        ),
        (0, lambda rows: with_slot_0(rows, Op.SEND, Op.WAIT_SEND), "rank 0, position .* SEND .*send 0 is still under"),
        (
            0,
            swap_sends,
            r"channel 0 \(activation 0->1\), message 0: rank 0 sends .* microbatch 1 at position \d+, while rank 1 "
            r"receives .* microbatch 0 at position 0",
        ),
    ],
    ids=["slot in use", "send number in use", "reordered sends"],
)
def test_one_fault_among_two_messages(rank: int, change: Callable[[Rows], Any], message: str) -> None:
    program = fastpipe.lower(fastpipe.make_schedule("gpipe", num_ranks=2, num_microbatches=2))
    refused(rebuilt(program, rank, change), message)


def test_no_sends_and_nothing_that_needs_them(program: Program) -> None:
    columns = [np.zeros((7, 0), dtype=np.int32)] * 2
    refused(with_columns(program, columns), "rank 0, end of the program: stage 0, microbatch 0 had no F")


def test_one_side_only() -> None:
    program = fastpipe.lower(fastpipe.make_schedule("gpipe", num_ranks=3, num_microbatches=1))
    swapped = with_columns(program, program.columns, tuple(program.channels[i] for i in (1, 0, 2, 3)))
    refused(swapped, "rank 0, position .*is not the")


def test_the_cycle_names_ranks_and_positions_of_both() -> None:
    # both ranks wait for the other's message before they send their own
    placement = fastpipe.Placement.bidirectional(2)
    schedule = Schedule.from_actions("both", placement, 2, [["0F0", "1F1"], ["0F1", "1F0"]])
    program = fastpipe.lower(schedule)
    validate_program(program)

    def wait_for_the_send_at_once(rows: list[Instruction]) -> None:
        wait = next(p for p, i in enumerate(rows) if i.op is Op.WAIT_SEND)
        send = next(p for p, i in enumerate(rows) if i.op is Op.SEND)
        post = next(p for p, i in enumerate(rows) if i.op is Op.POST_RECV)
        last = rows.pop(wait)
        receive = rows.pop(post)
        rows.insert(send, last)
        rows.insert(send + 1, receive)

    both = rebuilt(rebuilt(program, 0, wait_for_the_send_at_once), 1, wait_for_the_send_at_once)
    with pytest.raises(ProgramError) as refusal:
        validate_program(both)
    assert str(refusal.value) == (
        "the program can hang, ranks wait in a cycle: "
        "rank 0 (blocked in its wait for position 1): position 1, SEND        activation of stage 0 microbatch 0, "
        "peer 1, channel 0 (activation 0->1), send 0 waits for rank 1; "
        "rank 1 (blocked in its wait for position 1): position 1, SEND        activation of stage 0 microbatch 1, "
        "peer 0, channel 1 (activation 1->0), send 0 waits for rank 0"
    )


@pytest.mark.parametrize(
    ("position", "change", "message"),
    [
        (1, {"op": 14}, r"rank 0, position 1, \(14, .*\): 14 is no operation"),
        (1, {"op": -1}, "-1 is no operation"),
        (1, {"pair_stage": 0}, "F has no pair; leave its fields -1"),
        (2, {"pair_microbatch": 0}, "SEND has no pair"),
        (1, {"channel": 0}, "F has no channel and no slot"),
        (1, {"slot": 0}, "F has no channel and no slot"),
        (2, {"channel": 2}, "channel 2 is not one of 0 to 1"),
        (2, {"channel": -1}, "channel -1 is not one of 0 to 1"),
        (2, {"slot": -1}, "slot -1 is no slot"),
        (1, {"stage": 1}, "1F0 does not belong to rank 0"),
        (1, {"stage": 7}, "7F0 names no stage or microbatch of the program"),
        (1, {"microbatch": 1}, "0F1 names no stage or microbatch"),
        (1, {"op": Op.UNSHARD}, "UNSHARD has no microbatch; leave it -1"),
        (1, {"op": Op.UNSHARD, "microbatch": -1, "stage": 1}, "rank 0 does not hold stage 1"),
        (5, {"op": Op.I}, "stage 0, microbatch 0 had no B or W|still reads it"),
        (0, {"op": Op.HAND_OVER}, "a hand-over stays on its rank"),
        (0, {"channel": 0}, "rank 0 is not the destination of activation 0->1"),
    ],
)
def test_one_wrong_field(program: Program, position: int, change: dict[str, int], message: str) -> None:
    def edit(rows: list[Instruction]) -> None:
        rows[position] = rows[position]._replace(**change)

    refused(rebuilt(program, 0, edit), message)


def test_waits_and_frees_are_of_the_channel_of_their_transfer() -> None:
    # rank 1 receives activations from both sides: a wait or a free on the other channel would mislead a transport
    program = fastpipe.lower(hand(["0F0 2F0 2B0 0B0", "1F0 1B0"], [0, 1, 0], 1))
    other = Channel(0, 1, ChannelKind.GRADIENT)
    assert other in program.channels
    looped = fastpipe.lower(hand(["0F0 4F0 4B0 0B0", "1F0 3F0 3B0 1B0", "2F0 2B0"], [0, 1, 2, 1, 0], 1))
    for op, count in ((Op.WAIT_RECV, 3), (Op.FREE, 2), (Op.WAIT_SEND, 2)):
        for rank in range(3):
            refused_ones = 0
            for position, i in enumerate(looped[rank]):
                ends = [
                    n
                    for n, c in enumerate(looped.channels)
                    if n != i.channel
                    and c.kind == looped.channels[i.channel].kind
                    and (c.source if op is Op.WAIT_SEND else c.destination) == rank
                ]
                if i.op is op and ends:
                    changed = rebuilt(
                        looped,
                        rank,
                        lambda rows, p=position, c=ends[0]: rows.__setitem__(p, rows[p]._replace(channel=c)),
                    )
                    refused(changed, rf"rank {rank}, position {position}, {op.name}")
                    refused_ones += 1
            assert rank != 1 or refused_ones >= count - 1


def test_channels_are_different_and_between_ranks(program: Program) -> None:
    first = program.channels[0]
    refused(with_columns(program, program.columns, (*program.channels, first)), "channel 2 .* is channel 0 again")
    refused(
        with_columns(program, program.columns, (*program.channels, Channel(0, 2, ChannelKind.GRADIENT))),
        r"channel 2 \(gradient 0->2\): ranks are 0 to 1",
    )


def test_a_forward_only_program_has_no_backward(program: Program) -> None:
    # its inputs are freed after F: a backward would read what is gone
    claimed = Program("x", program.placement, 1, program.channels, program.columns, forward_only=True)
    refused(claimed, "rank 0, position 5, B +0B0: the program is forward-only: its inputs are freed after F")
    forward = fastpipe.lower(hand(["0F0", "1F0"], [0, 1], 1))
    refused(
        Program("x", forward.placement, 1, forward.channels, forward.columns, forward_only=False),
        "rank 1, position 3, FREE .*still reads it|had no B or I",
    )


def test_a_wait_for_a_send_that_only_a_receive_posted_ahead_would_end() -> None:
    # rank 0 waits for both its sends before it lets rank 1's message in; rank 1 has posted both receives, but waits for
    # the second one only after its own send was taken
    placement = fastpipe.Placement.bidirectional(2)
    orders = [["0F0", "0F1", "1F2", "1F3"], ["0F2", "1F0", "0F3", "1F1"]]
    program = fastpipe.lower(Schedule.from_actions("both", placement, 4, orders), recv_lookahead="all")

    def wait_early(rows: list[Instruction]) -> None:
        waits = [i for i in rows if i.op is Op.WAIT_SEND]
        rows[:] = [i for i in rows if i.op is not Op.WAIT_SEND]
        last = max(p for p, i in enumerate(rows) if i.op is Op.SEND)
        rows[last + 1 : last + 1] = waits

    def wait_at_once(rows: list[Instruction]) -> None:
        for wait in [i for i in rows if i.op is Op.WAIT_SEND]:
            rows.remove(wait)
            at = next(p for p, i in enumerate(rows) if i.op is Op.SEND and i.slot == wait.slot)
            rows.insert(at + 1, wait)

    both = rebuilt(rebuilt(program, 0, wait_early), 1, wait_at_once)
    with pytest.raises(ProgramError) as refusal:
        validate_program(both)
    assert str(refusal.value).startswith(
        "the program can hang, in a step that makes its receives at their waits, ranks wait in a cycle: "
    )
