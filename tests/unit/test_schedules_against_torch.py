"""The orders that are torch's, action for action: gpipe, looped_bfs, interleaved_1f1b, interleaved_zb, zbv, dualpipev.

torch generates an order inside a schedule object that wants live stages; the generators need a few numbers of it.
"""

import pytest

from fastpipe import make_schedule

torch_schedules = pytest.importorskip(
    "torch.distributed.pipelining.schedules", reason="torch is not installed: there is nothing to compare with"
)


def torch_order(name, p, m, v):
    """What torch's class of that name does on every rank, without idle steps."""
    schedule = object.__new__(getattr(torch_schedules, name))
    schedule.pp_group_size, schedule._n_microbatches = p, m
    schedule.n_local_stages, schedule._stages = v, [None] * v
    schedule._num_stages = schedule.num_stages = p * v
    schedule.number_of_rounds = max(1, m // p)
    schedule.microbatches_per_round = m // schedule.number_of_rounds
    if name == "ScheduleGPipe":
        rows = list(schedule._get_pipeline_order().values())
    else:
        rows = [schedule._calculate_single_rank_operations(rank) for rank in range(p)]
    return [" ".join(str(a) for a in row if a is not None and "REDUCE" not in str(a)) for row in rows]


def our_order(name, p, m, **options):
    return [str(rank) for rank in make_schedule(name, num_ranks=p, num_microbatches=m, **options)]


@pytest.mark.parametrize("p", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 6, 8, 9, 12, 13, 24])
def test_orders_are_those_of_torch(p, m):
    assert our_order("gpipe", p, m) == torch_order("ScheduleGPipe", p, m, 1)
    if m >= 2 * p - 1:  # torch leaves out the surplus of an order for 2p-1, which the search behind ZB-V does not
        assert our_order("zbv", p, m) == torch_order("ScheduleZBVZeroBubble", p, m, 2)
    if m >= 2 * p:
        assert our_order("dualpipev", p, m) == torch_order("ScheduleDualPipeV", p, m, 2)
    for v in (1, 2, 3):
        assert our_order("looped_bfs", p, m, stages_per_rank=v) == torch_order("ScheduleLoopedBFS", p, m, v)
        if m % max(1, m // p) == 0:  # torch takes no other m
            for ours, theirs in (
                ("interleaved_1f1b", "ScheduleInterleaved1F1B"),
                ("interleaved_zb", "ScheduleInterleavedZeroBubble"),
            ):
                assert our_order(ours, p, m, stages_per_rank=v) == torch_order(theirs, p, m, v)
