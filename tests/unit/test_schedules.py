"""Generated orders, action for action: small ones written by hand from their definitions, and what is refused."""

import hashlib
import re

import pytest

import fastpipe
from fastpipe import Placement, Schedule, make_schedule

NAMES = [
    "gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "1f1b_overlap", "interleaved_overlap", "zb_h1", "zb_h2",
    "zb_auto", "interleaved_zb", "loop_zb", "zbv", "v_half", "v_min", "wave_zb", "1f1b_v", "dualpipe", "dualpipev",
    "chimera", "hanayo", "forward_only",
]  # fmt: skip


def orders(name, p, m, **options):
    schedule = make_schedule(name, num_ranks=p, num_microbatches=m, **options)
    return [re.sub(r"\(([^;]*);([^)]*)\)OVERLAP_F_B", r"\1&\2", str(rank)) for rank in schedule]


def test_registry_has_every_schedule():
    assert [family.name for family in fastpipe.list_schedules()] == NAMES
    for family in fastpipe.list_schedules():
        assert family.name in str(family)
        for option in family.options:
            assert option in str(family)


@pytest.mark.parametrize(
    ("name", "p", "m", "options", "expected"),
    [
        ("gpipe", 1, 3, {"reverse_backward": True}, ["0F0 0F1 0F2 0B2 0B1 0B0"]),
        (
            "1f1b",
            3,
            4,
            {},
            [
                "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
                "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
                "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
            ],
        ),
        ("1f1b", 4, 1, {}, ["0F0 0B0", "1F0 1B0", "2F0 2B0", "3F0 3B0"]),
        (  # 5 microbatches on 2 ranks: groups of 3 and 2, the larger first
            "interleaved_1f1b",
            2,
            5,
            {"stages_per_rank": 1},
            ["0F0 0F1 0F2 0B0 0F3 0B1 0F4 0B2 0B3 0B4", "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3 1F4 1B4"],
        ),
        (
            "interleaved_1f1b",
            1,
            4,
            {"stages_per_rank": 2, "microbatch_group_size": 2},
            ["0F0 0F1 1F0 1B0 1F1 1B1 0F2 0B0 0F3 0B1 1F2 1B2 1F3 1B3 0B2 0B3"],
        ),
        (
            "1f1b_overlap",
            2,
            4,
            {},
            ["0F0 0F1 0F2 0F3&0B0 0B1 0B2 0B3", "1F0 1F1&1B0 1F2&1B1 1F3&1B2 1B3"],
        ),
        (
            "interleaved_overlap",
            2,
            2,
            {"stages_per_rank": 2},
            ["0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3F1&3B0 3B1 1B0 1B1"],
        ),
        (
            "zb_h1",
            3,
            4,
            {},
            [
                "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
                "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3",
                "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3",
            ],
        ),
        (
            "zb_h2",
            2,
            4,
            {},
            [
                "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
                "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3",
            ],
        ),
        ("zbv", 1, 1, {}, ["0F0 1F0 1I0 1W0 0I0 0W0"]),
        (
            "dualpipe",
            2,
            4,
            {},
            [
                "0F0 1F2 0F1 1B2 1F3&0B0 1B3 0I1 0W1",
                "0F2 1F0 0F3 1B0 1F1&0B2 1B1 0I3 0W3",
            ],
        ),
        (
            "chimera",
            4,
            4,
            {},
            [
                "0F0 0F1 3F2 3B2 3F3 3B3 0B0 0B1",
                "1F0 2F2 1F1 2F3 2B2 1B0 2B3 1B1",
                "1F2 2F0 1F3 2F1 2B0 1B2 2B1 1B3",
                "0F2 0F3 3F0 3B0 3F1 3B1 0B2 0B3",
            ],
        ),
        ("hanayo", 2, 2, {}, ["0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1", "1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1"]),
        ("forward_only", 2, 4, {"stages_per_rank": 2}, ["0F0 0F1 2F0 2F1 0F2 0F3 2F2 2F3",
                                                        "1F0 1F1 3F0 3F1 1F2 1F3 3F2 3F3"]),
    ],
)  # fmt: skip
def test_small_orders(name, p, m, options, expected):
    """Of schedules that torch has, with what it has not: tests/runtime/test_torch_schedules.py compares its orders."""
    assert orders(name, p, m, **options) == expected


@pytest.mark.parametrize(
    ("name", "p", "m", "options", "digest"),
    [
        ("v_half", 4, 8, {}, "16805e01a06d8c2a"),
        ("v_half", 7, 16, {}, "b39442691c4791c3"),
        ("v_min", 4, 8, {}, "6ec2af90d434590a"),
        ("v_min", 6, 12, {}, "74e70592492a7a2b"),
        ("1f1b_v", 4, 8, {}, "20eebfd8adf2e690"),
        ("1f1b_v", 6, 14, {}, "46d5687a79a0ff8d"),
        ("zb_auto", 4, 8, {"memory_limit": 4}, "ac2b73545ff3af92"),
        ("zb_auto", 4, 8, {"memory_limit": 8}, "af750cff5d3af801"),
        (
            "zb_auto",
            8,
            24,
            {"forward": 2, "backward_input": 3, "backward_weight": 1.5, "comm": 0.25, "memory_limit": 12},
            "4a6e1bf0c68f899a",
        ),
        ("zbv", 4, 8, {"forward": 2, "backward_input": 3, "backward_weight": 1}, "bdc18b5813d22342"),
        ("zbv", 6, 18, {"comm": 0.5, "memory_limit": 16}, "16f03569014ce7ac"),
    ],
)
def test_orders_that_were_compared_with_their_references(name, p, m, options, digest):
    """Of searched and squeezed orders, which nobody writes by hand: equal to what the references gave when compared."""
    schedule = make_schedule(name, num_ranks=p, num_microbatches=m, **options)
    assert hashlib.sha256(schedule.to_csv().encode()).hexdigest()[:16] == digest


@pytest.mark.parametrize(
    ("p", "m", "costs", "zb_1p", "zb_2p"),
    [
        (8, 24, (18.522, 18.086, 9.337, 0.601), 0.1585, 0.0433),
        (8, 32, (18.522, 18.086, 9.337, 0.601), 0.1242, 0.0039),
        (8, 64, (29.718, 29.444, 19.927, 0.527), 0.0554, 0.0012),
        (16, 48, (11.347, 11.248, 8.132, 0.377), 0.1397, 0.0066),
        (32, 96, (10.419, 10.207, 7.715, 0.408), 0.1421, 0.0038),
    ],
)
def test_zb_auto_has_the_bubbles_of_the_paper(p, m, costs, zb_1p, zb_2p):
    """Shares of the span in memory of p and 2p activations, from the tables of arXiv 2401.10241; or less than these."""
    named = dict(zip(("forward", "backward_input", "backward_weight", "comm"), costs, strict=True))
    for limit, published in ((p, zb_1p), (2 * p, zb_2p)):
        options = {**named, "memory_limit": limit, "freed_by_input": 0.5}
        schedule = make_schedule("zb_auto", num_ranks=p, num_microbatches=m, **options)
        bubble = 1 - m * sum(costs[:3]) / fastpipe.simulate(schedule, fastpipe.CostModel(**named)).span
        assert published - 0.003 < bubble < published + 0.00005


def test_dualpipe_meets_in_the_middle():
    """The two middle ranks run the very first pair unfused; direction 0 starts at the rank's nearer end."""
    rows = orders("dualpipe", 4, 8)
    assert rows[0].startswith("0F0 0F1 0F2 3F4 3I4 3W4 3F5 0F3&3B5 3F6&0B0")
    assert rows[1].startswith("1F0 2F4 1F1 2F5 1F2 2B4 2F6&1B0")
    assert rows[3].startswith("0F4 0F5 0F6 3F0 3I0 3W0 3F1 0F7&3B1 3F2&0B4")


@pytest.mark.parametrize("name", NAMES)
def test_names_and_options_are_kept(name):
    schedule = make_schedule(name.upper(), num_ranks=2, num_microbatches=4)
    assert schedule.name == name
    assert schedule.num_microbatches == 4
    assert schedule.options == {}


def test_searched_orders_take_costs_a_rank():
    slow_last = make_schedule("zb_auto", num_ranks=4, num_microbatches=8, forward=[1, 1, 1, 2], memory_limit=8)
    even = make_schedule("zb_auto", num_ranks=4, num_microbatches=8, memory_limit=8)
    assert slow_last != even
    assert slow_last.options == {"forward": (1, 1, 1, 2), "memory_limit": 8}


@pytest.mark.parametrize(("p", "m", "seconds"), [(2, 2, 13), (4, 4, 27), (4, 5, 33), (8, 8, 55), (8, 9, 61)])
def test_zbv_of_few_microbatches_is_the_published_search(p, m, seconds):
    """What torch gives there, an order for 2p-1 with the surplus left out, takes up to 13 % longer (62 for 8, 8)."""
    schedule = make_schedule("zbv", num_ranks=p, num_microbatches=m).validate()
    assert fastpipe.simulate(schedule).makespan == seconds


def test_zbv_by_hand_and_searched_differ_in_their_last_weights_alone():
    """For F = I = W a search with a hair of other costs finds the same order of F and I."""
    by_hand = make_schedule("zbv", num_ranks=4, num_microbatches=8)
    searched = make_schedule("zbv", num_ranks=4, num_microbatches=8, comm=1e-9)
    for ours, theirs in zip(by_hand, searched, strict=True):
        assert [a for a in ours if a.kind.name != "W"] == [a for a in theirs if a.kind.name != "W"]


def test_an_order_by_hand():
    schedule = Schedule.from_actions("mine", Placement.loop(2), 1, [["0F0", "0B0"], ["1F0", "1I0", "1W0"]])
    assert fastpipe.simulate(schedule).makespan == 5


@pytest.mark.parametrize(
    ("name", "p", "m", "options", "message"),
    [
        ("1f1b", 0, 4, {}, "num_ranks = 0"),
        ("1f1b", 2, 0, {}, "num_microbatches = 0"),
        ("1f1b", 2, True, {}, "num_microbatches = True"),
        ("1f1b", 2.0, 4, {}, "num_ranks = 2.0"),
        ("2f2b", 2, 4, {}, "there is no such schedule; use one of gpipe, 1f1b"),
        ("1f1b", 2, 4, {"stages_per_rank": 2}, "1f1b has no such option; its options are: none"),
        ("gpipe", 2, 4, {"reverse_backward": 1}, "reverse_backward = 1"),
        ("interleaved_1f1b", 2, 4, {"stages_per_rank": 0}, "stages_per_rank = 0"),
        ("interleaved_1f1b", 4, 10, {"microbatch_group_size": 3}, "microbatch_group_size = 3"),
        ("interleaved_zb", 4, 10, {"microbatch_group_size": 4}, "(remainder 2) it can deadlock; give a size G >= 4"),
        ("dualpipe", 3, 12, {}, "num_ranks = 3, num_microbatches = 12"),
        ("dualpipe", 4, 9, {}, "needs an even number of both"),
        ("dualpipe", 4, 6, {}, "num_microbatches = 6: dualpipe on 4 ranks needs at least 8"),
        ("dualpipev", 4, 7, {}, "num_microbatches = 7: dualpipev on 4 ranks needs at least 8"),
        ("chimera", 3, 4, {}, "num_ranks = 3"),
        ("chimera", 2, 3, {}, "num_microbatches = 3"),
        ("hanayo", 2, 4, {"waves": 0}, "waves = 0"),
        ("zb_auto", 2, 4, {"forward": -1}, "forward = -1"),
        ("zb_auto", 2, 4, {"forward": [1, 2, 3]}, "forward has 3 values for num_ranks = 2"),
        ("zb_auto", 2, 4, {"memory_limit": 0}, "memory_limit = 0"),
        ("zb_auto", 2, 4, {"comm": float("nan")}, "comm = nan"),
        ("zbv", 4, 8, {"memory_limit": 7}, "memory_limit = 7: zbv on 4 ranks holds 8"),
        ("zbv", 4, 8, {"forward": [1, 1, 1, 1]}, "forward = [1, 1, 1, 1]"),
        ("forward_only", 2, 3, {"placement": "bidirectional"}, "num_microbatches = 3"),
        ("forward_only", 3, 3, {"placement": Placement.loop(2)}, "placement has 2 ranks, and num_ranks = 3"),
        (
            "forward_only",
            2,
            3,
            {"placement": Placement.v(2), "stages_per_rank": 3},
            "stages_per_rank = 3: the placement",
        ),
        ("forward_only", 2, 4, {"placement": "bidirectional", "stages_per_rank": 3}, "stages_per_rank = 3: the"),
        ("forward_only", 3, 3, {"placement": "ring"}, "placement = 'ring'"),
        ("1f1b", 10**9, 1, {}, "num_ranks = 1000000000: there are at most 1,000,000"),
        ("zbv", 8, 10**9, {}, "that is 16,000,000,000 forwards, and a schedule has at most 100,000,000"),
        ("interleaved_1f1b", 4, 4, {"stages_per_rank": 10**9}, "1000000000: that is 16,000,000,000 forwards"),
        ("hanayo", 2, 4, {"waves": 10**8}, "stages_per_rank = 200000000: that is 1,600,000,000 forwards"),
    ],
)
def test_refused_with_the_numbers(name, p, m, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make_schedule(name, num_ranks=p, num_microbatches=m, **options)


def test_a_bidirectional_placement_has_two_stages_a_rank():
    """As many as a rank holds may be named, of routes too."""
    numbers = {"num_ranks": 4, "num_microbatches": 8, "placement": "bidirectional"}
    assert make_schedule("forward_only", stages_per_rank=2, **numbers) == make_schedule("forward_only", **numbers)


def test_what_is_refused_could_deadlock():
    """Groups smaller than the ranks; the smaller group first."""
    with pytest.raises(fastpipe.ScheduleError, match="waits in a cycle"):
        interleaved(4, [range(0, 2), range(2, 4)]).validate()
    with pytest.raises(fastpipe.ScheduleError, match="waits in a cycle"):
        interleaved(4, [range(0, 4), range(4, 9)]).validate()
    interleaved(4, [range(0, 5), range(5, 9)]).validate()


def interleaved(p, groups):
    """Interleaved 1F1B with two stages per rank over any groups, none refused."""
    from fastpipe.schedules.interleaved import _interleave
    from fastpipe.schedules.one_f_one_b import alternate

    return _interleave("any", p, 2, groups, lambda r, n, total: alternate("F B", 2 * (p - 1 - r) + n, total))


def test_large_schedules_are_columns():
    """A hundred thousand actions without an object an action; the time of millions is in the benchmarks."""
    schedule = make_schedule("interleaved_1f1b", num_ranks=32, num_microbatches=512, stages_per_rank=4)
    assert schedule.num_actions == 32 * 512 * 4 * 2
    assert schedule.columns[0].dtype == "int32"
