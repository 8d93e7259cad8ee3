import numpy as np
import pytest

import fastpipe
from fastpipe import CostModel, Op, Timeline, simulate
from tests.unit.planning import hand


@pytest.fixture
def timeline() -> Timeline:
    return simulate(hand(["0F0 0B0", "1F0 1B0"], [0, 1], 1), CostModel(1, 1, 1, comm=0.5))


def test_measures(timeline: Timeline) -> None:
    assert timeline.start == 0 and timeline.makespan == timeline.span == 7
    assert timeline.busy == (3, 3)
    assert timeline.bubble_fraction == timeline.span_bubble_fraction == pytest.approx(1 - 6 / 14)


def test_span_and_makespan_differ_where_ranks_start_and_end_apart() -> None:
    timeline = simulate(hand(["0F0 0I0 0W0", "1F0 1I0 1W0"], [0, 1], 1), CostModel(1, 1, 1))
    assert timeline.makespan == 5
    forward = simulate(hand(["0F0 0F1", "1F0 1F1"], [0, 1], 2))
    assert (forward.makespan, forward.span) == (3, 2)
    assert forward.span_bubble_fraction == 0


def test_peaks_by_both_conventions() -> None:
    timeline = simulate(hand(["0F0 0I0 0F1 0I1 0W0 0W1"], [0], 2))
    assert timeline.peak_activations == (2,)
    assert timeline.peak_activations_released_at_input == (1,)


def test_spans(timeline: Timeline) -> None:
    first = next(s for s in timeline if s.instruction.op is Op.F)
    assert (first.rank, first.lane, first.start, first.end) == (0, "compute", 0, 1)
    send = next(s for s in timeline if s.instruction.op is Op.SEND)
    assert (send.lane, send.start, send.end) == ("activation 0->1", 1, 1.5)
    assert [str(s.instruction.action) for s in timeline.compute_spans(1)] == ["1F0", "1B0"]


def test_a_rank_that_was_not_recorded() -> None:
    whole = simulate(hand(["0F0 0B0", "1F0 1B0"], [0, 1], 1), CostModel(1, 1, 1))
    nothing = np.full(len(whole.starts[1]), np.nan)
    part = Timeline(whole.program, [whole.starts[0], nothing], [whole.ends[0], nothing], measured=True)
    assert part.makespan == 6 and part.busy == (3, 0)
    assert part.bubble_fraction == 0.5
    assert {s.rank for s in part} == {0}
    assert [str(s.instruction.action) for s in part.critical_path()] == ["0F0", "0B0"]
    assert part.exposed_communication == (0, 0)
    assert CostModel.from_timeline(part).forward == (1, 1)
    with pytest.raises(ValueError, match="a measured timeline has no costs"):
        part.peak_bytes  # noqa: B018


def test_difference_of_predicted_and_measured(timeline: Timeline) -> None:
    later = Timeline(timeline.program, [s + 100 for s in timeline.starts], [e + 100.25 for e in timeline.ends])
    assert all(np.allclose(d, 0.25) for d in later.difference(timeline))
    other = simulate(hand(["0F0 0B0"], [0], 1))
    with pytest.raises(ValueError, match="of different programs"):
        timeline.difference(other)


def test_the_printed_table_is_right(timeline: Timeline) -> None:
    lines = str(simulate(hand(["0F0 0B0", "1F0 1B0"], [0, 1], 1), CostModel(1, 1, 1))).splitlines()
    assert lines[0] == "<Timeline mine, simulated: makespan 6, bubble 50.0%>"
    assert [line.split() for line in lines[1:]] == [
        ["time", "rank", "0", "rank", "1"],
        ["0", "0F0", "."],
        ["1", ".", "1F0"],
        ["2", ".", "1B0"],
        ["3", ".", "|"],
        ["4", "0B0", "."],
        ["5", "|", "."],
    ]


def test_no_action_is_lost_from_the_table() -> None:
    # more actions than rows, and lengths that do not divide each other
    schedule = fastpipe.make_schedule("1f1b", num_ranks=2, num_microbatches=150)
    for cost in (CostModel(1, 1, 1), CostModel(0.3, 1.7, 0.9), CostModel(0.001, 5, 5)):
        timeline = simulate(schedule, cost)
        lines = str(timeline).splitlines()[2:]
        assert len(lines) <= 201
        for rank in range(2):
            named = sum(
                sum(1 if not word.startswith("+") else int(word) for word in cell.split())
                for cell in (line[12:].split("  ")[0] if rank == 0 else line[12:].split("  ")[-1] for line in lines)
                if cell.strip() not in (".", "|")
            )
            assert rank == 1 or named == 300


def test_an_empty_timeline() -> None:
    timeline = simulate(hand(["0F0"], [0], 1), CostModel(0, 0, 0))
    assert timeline.makespan == timeline.bubble_fraction == 0
    assert str(timeline).endswith("(empty)")
