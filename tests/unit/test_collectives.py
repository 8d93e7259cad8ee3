"""Where UNSHARD and REDUCE_GRAD go: before the first use of a stage, after its last backward for weights. And that
collectives between pipelines that run the same program end, those within actions included."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings

import fastpipe
from fastpipe import Channel, ChannelKind, Instruction, Op, Placement, Program, Schedule, validate_program
from fastpipe.collectives import with_collectives
from fastpipe.lower import lower
from fastpipe.machine import Machine
from tests.unit.planning import forward_only, hand, random_schedules, small_schedules

pytestmark = pytest.mark.filterwarnings("ignore:.*come in another order")
STAGE_OPS = (Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD)


def ops(program: Program, rank: int) -> str:
    return " ".join(str(i.action) if i.action else i.op.name.lower() + str(i.stage) for i in program[rank])


def test_two_ranks_to_the_letter() -> None:
    program = with_collectives(lower(hand(["0F0 0I0 0W0", "1F0 1B0"], [0, 1], 1)))
    assert ops(program, 0) == ("unshard0 post_recv0 0F0 send0 wait_recv0 wait_send0 0I0 0W0 free0 reduce_grad0")
    assert ops(program, 1) == "unshard1 post_recv1 wait_recv1 1F0 1B0 send1 free1 reduce_grad1 wait_send1"


def test_a_stage_is_reduced_while_others_go_on() -> None:
    program = with_collectives(lower(hand(["0F0 1F0 (0F1;1B0)OVERLAP_F_B 1F1 1B1 0B0 0B1"], [0, 0], 2)))
    kept = [str(i.action) if i.action else i.op.name for i in program[0] if i.op < Op.POST_RECV]
    wanted = "UNSHARD 0F0 UNSHARD 1F0 (0F1;1B0)OVERLAP_F_B 1F1 1B1 REDUCE_GRAD 0B0 0B1 REDUCE_GRAD"
    assert " ".join(kept) == wanted
    assert [i.stage for i in program[0] if i.op is Op.REDUCE_GRAD] == [1, 0]


def test_what_a_schedule_has_already_is_kept() -> None:
    order = "0UNSHARD 0F0 0RESHARD 0F1 0B0 0B1 0RESHARD 0REDUCE_GRAD"
    program = with_collectives(lower(hand([order], [0], 2)))
    assert ops(program, 0) == "unshard0 0F0 reshard0 unshard0 0F1 0B0 0B1 reshard0 reduce_grad0"
    unsplit = lower(hand(["0UNSHARD 0F0 0B0 0REDUCE_GRAD"], [0], 1))
    assert ops(with_collectives(unsplit), 0) == ops(unsplit, 0)


def test_every_stage_ends_with_a_reshard_for_torch() -> None:
    def ended(order: str) -> str:
        return ops(with_collectives(lower(hand([order], [0], 2)), reshards=True), 0)

    assert ended("0F0 0F1 0I0 0I1 0W0 0W1") == "unshard0 0F0 0F1 0I0 0I1 0W0 0W1 reduce_grad0 reshard0"
    assert ended("0F0 0F1 0B0 0REDUCE_GRAD 0B1") == "unshard0 0F0 0F1 0B0 reduce_grad0 0B1 reshard0"
    for kept in ("0RESHARD 0REDUCE_GRAD", "0REDUCE_GRAD 0RESHARD"):
        assert ended(f"0UNSHARD 0F0 0F1 0B0 0B1 {kept}").count("reshard0") == 1
    two = with_collectives(lower(forward_only(2, 3)), reshards=True)
    assert [i.op for rank in two for i in rank if i.op in STAGE_OPS] == [Op.UNSHARD, Op.RESHARD] * 2


def test_forwards_alone_reduce_nothing() -> None:
    program = with_collectives(lower(forward_only(2, 3)))
    found = [i.op for rank in program for i in rank if i.op in STAGE_OPS]
    assert found == [Op.UNSHARD] * 2


def check(schedule: Schedule) -> None:
    """Nothing else moves, the program stays proved, and every stage is used ready and reduced complete."""
    plain = lower(schedule)
    program = validate_program(with_collectives(plain))
    for rank, before in zip(program, plain, strict=True):
        added = [i for i in rank if i.op in STAGE_OPS]
        assert [i for i in rank if i.op not in STAGE_OPS] == [i for i in before if i.op not in STAGE_OPS]
        backward = {i.stage for i in rank if i.op in (Op.B, Op.W)} | {
            i.pair_stage for i in rank if i.op is Op.OVERLAP_F_B
        }
        assert sorted(i.stage for i in added if i.op is Op.REDUCE_GRAD) == sorted(backward)
        ready: set[int] = set()
        reduced: set[int] = set()
        for it in rank:
            ready |= {it.stage} if it.op is Op.UNSHARD else set()
            ready -= {it.stage} if it.op is Op.RESHARD else set()
            reduced |= {it.stage} if it.op is Op.REDUCE_GRAD else set()
            if it.op in (Op.F, Op.B, Op.I, Op.OVERLAP_F_B):
                assert it.stage in ready and it.pair_stage in ready | {-1}
            if it.op in (Op.B, Op.I, Op.W):
                assert it.stage not in reduced


@pytest.mark.parametrize("schedule", small_schedules(), ids=repr)
def test_small_schedules(schedule: Schedule) -> None:
    check(schedule)


@given(random_schedules())
@settings(max_examples=30, deadline=None)
def test_random_schedules(schedule: Schedule) -> None:
    check(schedule)


def test_both_holders_of_a_stage_reduce_it() -> None:
    program = with_collectives(lower(fastpipe.make_schedule("dualpipe", num_ranks=4, num_microbatches=8)))
    for rank, instructions in enumerate(program):
        assert sorted(i.stage for i in instructions if i.op is Op.REDUCE_GRAD) == sorted({rank, 3 - rank})


def side_by_side(pipelines: Sequence[Program]) -> Program:
    """Pipelines as one program, whose equal ranks wait for each other in every action and collective: each sends the
    others a message and waits for theirs, as in a collective that nobody leaves before all have come."""
    size, count = pipelines[0].num_ranks, len(pipelines)
    channels: list[Channel] = []
    first = []  # each pipeline's first channel
    for own, program in enumerate(pipelines):
        first.append(len(channels))
        channels += [Channel(c.source + own * size, c.destination + own * size, c.kind) for c in program.channels]
    meeting: dict[tuple[int, int], int] = {}
    for own, other in itertools.permutations(range(count), 2):
        for rank in range(size):
            meeting[rank + own * size, rank + other * size] = len(channels)
            channels.append(Channel(rank + own * size, rank + other * size, ChannelKind.ACTIVATION))

    def met(rank: int) -> list[Instruction]:
        into = [channel for (_, to), channel in meeting.items() if to == rank]
        out = [channel for (of, _), channel in meeting.items() if of == rank]
        ops = ((Op.POST_RECV, into), (Op.SEND, out), (Op.WAIT_RECV, into), (Op.WAIT_SEND, out))
        # slots that no pipeline uses
        return [Instruction(op, channel=channel, slot=1000 + channel) for op, used in ops for channel in used]

    columns = []
    for own, program in enumerate(pipelines):
        for rank, instructions in enumerate(program, start=own * size):
            rows: list[Instruction] = []
            for it in instructions:
                if it.op < Op.POST_RECV:
                    rows += [*met(rank), it]
                else:
                    rows.append(it._replace(channel=it.channel + first[own]))
            columns.append(np.array(rows, dtype=np.int32).T)
    placement = Placement.loop(size * count)
    return Program("side by side", placement, pipelines[0].num_microbatches, tuple(channels), tuple(columns))


def ends(pipelines: Sequence[Program]) -> bool:
    whole = side_by_side(pipelines)
    return not any(Machine(whole, late=late).run().blocked for late in (False, True))


@pytest.mark.parametrize("name", [family.name for family in fastpipe.list_schedules()])
def test_pipelines_with_the_same_program_end(name: str) -> None:
    program = with_collectives(lower(fastpipe.make_schedule(name, num_ranks=4, num_microbatches=8)))
    assert ends([program] * 3)


@given(random_schedules())
@settings(max_examples=30, deadline=None)
def test_random_pipelines_with_the_same_program_end(schedule: Schedule) -> None:
    assert ends([with_collectives(lower(schedule))] * 2)


def test_pipelines_with_other_programs_can_hang() -> None:
    one, other = (
        with_collectives(lower(fastpipe.make_schedule(name, num_ranks=4, num_microbatches=8)))
        for name in ("looped_bfs", "1f1b_v")
    )
    assert not ends([one, other])
