from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fastpipe
from fastpipe import Op, Placement, Program, Schedule, validate_program
from fastpipe.lower import lower
from fastpipe.program import COMPUTE_OPS, ChannelKind
from tests.unit.planning import forward_only, hand, random_schedules, small_schedules

pytestmark = pytest.mark.filterwarnings("ignore:.*come in another order")


def ops(program: Program, rank: int) -> str:
    return " ".join(str(i.action or i.op.name) for i in program[rank])


def test_two_ranks_to_the_letter() -> None:
    program = lower(hand(["0F0 0B0", "1F0 1B0"], [0, 1], 1))
    assert ops(program, 0) == "POST_RECV 0F0 SEND WAIT_RECV WAIT_SEND 0B0 FREE"
    assert ops(program, 1) == "POST_RECV WAIT_RECV 1F0 1B0 SEND FREE WAIT_SEND"
    assert [str(channel) for channel in program.channels] == ["activation 0->1", "gradient 1->0"]
    assert program[0][2].channel == program[1][0].channel == 0
    assert program[0][2].stage == 0 and program[1][0].stage == 1


def test_a_hand_over_needs_no_transport() -> None:
    program = lower(hand(["0F0 1F0 1B0 0B0"], [0, 0], 1))
    assert ops(program, 0) == "0F0 HAND_OVER 1F0 1B0 HAND_OVER FREE 0B0 FREE"
    assert [i.slot for i in program[0] if i.op is Op.HAND_OVER] == [0, 1]


@pytest.mark.parametrize("schedule", small_schedules(), ids=repr)
def test_compute_is_kept_and_the_program_is_proved(schedule: Schedule) -> None:
    for lookahead in (0, 1, 3, "all"):
        program = validate_program(lower(schedule, recv_lookahead=lookahead))
        for rank, order in enumerate(schedule):
            mine = [i for i in program[rank] if i.op < Op.POST_RECV]
            assert [i[:5] for i in mine] == [tuple(action) for action in order]
        assert program.forward_only == schedule.forward_only


@given(random_schedules())
@settings(max_examples=60, deadline=None)
def test_every_order_that_can_run_lowers_to_a_program_that_cannot_hang(schedule: Schedule) -> None:
    for lookahead in (0, 2, "all"):
        validate_program(lower(schedule, recv_lookahead=lookahead))


@pytest.mark.parametrize("lookahead", [0, 1, 2, 5])
def test_receives_are_posted_ahead_of_their_consumer(lookahead: int) -> None:
    program = lower(fastpipe.make_schedule("1f1b", num_ranks=4, num_microbatches=8), recv_lookahead=lookahead)
    for rank in program:
        compute = 0
        posted: dict[tuple[int, int, int], int] = {}
        for i in rank:
            key = (i.channel, i.stage, i.microbatch)
            if i.op in COMPUTE_OPS:
                compute += 1
            elif i.op is Op.POST_RECV:
                posted[key] = compute
            elif i.op is Op.WAIT_RECV:
                # earlier only where the sender's order on the channel demands it: never in 1F1B
                assert posted[key] == max(0, compute - lookahead)


def test_all_receives_first() -> None:
    program = lower(fastpipe.make_schedule("gpipe", num_ranks=2, num_microbatches=4), recv_lookahead="all")
    assert [i.op for i in program[1][:4]] == [Op.POST_RECV] * 4


@pytest.mark.parametrize("wrong", [-1, 1.5, "ALL", None])
def test_a_wrong_lookahead(wrong: object) -> None:
    schedule = forward_only(1, 1)
    with pytest.raises(ValueError, match="recv_lookahead = .*at least 0, or 'all'"):
        lower(schedule, recv_lookahead=wrong)  # type: ignore[arg-type]


def test_slots_are_as_many_as_the_pipeline_is_deep_not_one_a_microbatch() -> None:
    few, many = (
        lower(fastpipe.make_schedule("1f1b", num_ranks=4, num_microbatches=m), recv_lookahead=0) for m in (8, 64)
    )
    assert few.num_slots == many.num_slots
    for rank in many:
        activations = {
            i.slot for i in rank if i.op is Op.POST_RECV and rank.channels[i.channel].kind is ChannelKind.ACTIVATION
        }
        assert len(activations) == (0 if rank.rank == 0 else 4 - rank.rank)


def test_sends_under_way_do_not_grow_with_the_microbatches() -> None:
    few, many = (lower(fastpipe.make_schedule("1f1b", num_ranks=4, num_microbatches=m)) for m in (8, 64))
    assert [rank.num_sends for rank in few] == [rank.num_sends for rank in many]


def test_streaming_holds_little() -> None:
    program = validate_program(lower(forward_only(4, 64)))
    assert [rank.num_sends for rank in program] == [2, 2, 2, 0]
    assert max(program.num_slots) == 2
    assert program.peak_activations == (1, 1, 1, 1)
    validate_program(lower(forward_only(4, 64), recv_lookahead=0), lanes="pair")


def test_forward_only_over_several_stages_a_rank() -> None:
    # a rank that waits for its first stage's send may be waited for by its second stage's sender
    orders = ["0F0 0F1 0F2 0F3 2F0 2F1 2F2 2F3", "1F0 1F1 1F2 1F3 3F0 3F1 3F2 3F3"]
    validate_program(lower(hand(orders, [0, 1, 0, 1], 4)))


def test_a_slot_is_of_one_channel_only() -> None:
    for schedule in small_schedules():
        for rank in lower(schedule):
            channel_of: dict[int, int] = {}
            for i in rank:
                if i.op in (Op.POST_RECV, Op.HAND_OVER):
                    assert channel_of.setdefault(i.slot, i.channel) == i.channel


def test_frees_come_with_the_last_compute_that_may_read() -> None:
    program = lower(hand(["0F0 0I0 0F1 0I1 0W0 0W1", "1F0 1I0 1F1 1I1 1W0 1W1"], [0, 1], 2))
    assert ops(program, 1).endswith("1I1 SEND 1W0 FREE 1W1 FREE WAIT_SEND")


def test_transfers_that_were_loaded_are_left_aside() -> None:
    mine = hand(["0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"], [0, 1], 1)
    assert str(lower(mine)) == str(lower(mine.without_transfers()))


@given(st.integers(1, 4), st.integers(1, 6), st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_streaming_cannot_hang_whatever_the_order_of_microbatches(ranks: int, count: int, random: Random) -> None:
    places = random.sample(range(ranks), ranks)
    orders = [[f"{places.index(r)}F{m}" for m in random.sample(range(count), count)] for r in range(ranks)]
    schedule = Schedule.from_actions("stream", Placement.custom(places), count, orders)
    program = validate_program(lower(schedule.validate()))
    assert max(rank.num_sends for rank in program) <= 2
