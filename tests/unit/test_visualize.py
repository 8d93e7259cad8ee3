"""Pictures, traces, pages and grids hold what the timeline holds."""

import base64
import json
import re
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fastpipe
from fastpipe.api import Comparison
from fastpipe.visualize import grid, pareto, plot, to_chrome_trace, to_html
from fastpipe.visualize.bars import bars, critical_bars, limited_by, live_activations, runs, transfers, waited_for
from fastpipe.visualize.page import page_data
from fastpipe.visualize.pareto import Box, place_labels
from fastpipe.visualize.rows import font_size, pixels

NAMES = ("gpipe", "1f1b", "interleaved_1f1b", "zbv", "dualpipe", "dualpipev")


def simulated(name: str = "dualpipev", ranks: int = 4, microbatches: int = 10, **costs: Any) -> fastpipe.Timeline:
    schedule = fastpipe.make_schedule(name, num_ranks=ranks, num_microbatches=microbatches)
    return fastpipe.simulate(schedule, fastpipe.CostModel(**costs))


def test_peaks_of_stages_of_different_size_are_counted_in_shares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `compare` counts them: 1F1B and ZB-V hold the same; beside its own kind a stage is a stage."""
    rows = pytest.importorskip("fastpipe.visualize.rows", exc_type=ImportError)
    written: list[str] = []
    real = rows.Panel._write_peaks

    def noted(self: Any, *numbers: Any) -> None:
        before = len(self.axes.texts)
        real(self, *numbers)
        written.extend(text.get_text() for text in self.axes.texts[before:])

    monkeypatch.setattr(rows.Panel, "_write_peaks", noted)
    one, two, third = (simulated(name, 4, 8) for name in ("1f1b", "zbv", "interleaved_1f1b"))
    plot(one, tmp_path / "both.svg", against=two)
    assert written == ["peak live\n(shares)", "4", "3", "2", "1", "peak live\n(shares)", "4", "4", "4", "4"]
    written.clear()
    plot(two, tmp_path / "same.svg", against=third)
    plot(two, tmp_path / "one.svg")
    assert written[:2] == written[10:12] == ["peak\nlive", "8"] and "(shares)" not in str(written)


def computes(timeline: fastpipe.Timeline) -> list[fastpipe.Span]:
    return [span for rank in range(timeline.program.num_ranks) for span in timeline.compute_spans(rank)]


# Bars


@pytest.mark.parametrize("name", NAMES)
def test_bars_are_the_compute_spans(name: str) -> None:
    timeline = simulated(name, 4, 8, comm=0.25)
    drawn = bars(timeline)
    spans = computes(timeline)
    assert len(drawn) == len(spans)
    assert drawn.rank.tolist() == [span.rank for span in spans]
    assert drawn.stage.tolist() == [span.instruction.stage for span in spans]
    assert drawn.start.tolist() == pytest.approx([span.start for span in spans])
    assert drawn.end.tolist() == pytest.approx([span.end for span in spans])
    assert drawn.num_tracks == 1


@pytest.mark.parametrize("name", NAMES)
def test_the_live_activations_reach_the_peak(name: str) -> None:
    timeline = simulated(name, 4, 8)
    drawn = bars(timeline)
    for rank, peak in enumerate(timeline.peak_activations):
        times, levels = live_activations(drawn, rank)
        assert (np.diff(times) > 0).all()
        assert levels[-1] == 0
        assert levels.max() <= peak


def test_actions_of_one_rank_at_the_same_time_get_tracks_of_their_own() -> None:
    timeline = simulated("1f1b", 2, 4)
    first = bars(timeline).position[1]
    starts = [array.copy() for array in timeline.starts]
    starts[0][first] -= 0.5
    drawn = bars(fastpipe.Timeline(timeline.program, starts, timeline.ends, measured=True))
    assert drawn.num_tracks == 2
    for track in range(2):
        mine = np.flatnonzero((drawn.rank == 0) & (drawn.track == track))
        assert all(drawn.end[a] <= drawn.start[b] + 1e-9 for a, b in pairwise(mine[np.argsort(drawn.start[mine])]))


@pytest.mark.parametrize("name", NAMES)
def test_what_a_bar_waited_for_ended_before_it_began(name: str) -> None:
    drawn = bars(simulated(name, 4, 8, comm=0.25))
    needed = waited_for(drawn)
    index, column = np.nonzero(needed >= 0)
    assert len(index)
    assert (drawn.end[needed[index, column]] <= drawn.start[index] + 1e-9).all()
    first_stage = (drawn.op == fastpipe.Op.F) & (drawn.stage == 0)
    assert (needed[first_stage] == -1).all()
    decided = limited_by(drawn, needed)
    some = decided >= 0
    assert (drawn.end[decided[some]] <= drawn.start[some] + 1e-9).all()
    assert ((drawn.start == 0) == ~some).all()


def test_the_critical_path_is_as_long_as_the_timeline_without_transfers() -> None:
    timeline = simulated("1f1b", 4, 8)
    drawn = bars(timeline)
    path = critical_bars(timeline, drawn)
    assert (drawn.end[path] - drawn.start[path]).sum() == pytest.approx(timeline.makespan)
    joined = runs(drawn, path)
    assert sum(last - first + 1 for first, last in joined) == len(path)
    assert len(joined) < len(path)


# Trace


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("comm", [0.0, 0.5])
def test_the_trace_has_every_compute_and_a_flow_for_every_transfer(name: str, comm: float, tmp_path: Path) -> None:
    timeline = simulated(name, 4, 8, comm=comm)
    path = to_chrome_trace(timeline, tmp_path / "trace.json")
    events = json.loads(path.read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    compute = [event for event in slices if event["cat"] != "transfer"]
    spans = computes(timeline)
    assert Counter(event["name"] for event in compute) == Counter(str(span.instruction.action) for span in spans)
    assert [e["ts"] for e in compute] == pytest.approx([1e6 * span.start for span in spans])
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    sends = sum(int((columns[0] == fastpipe.Op.SEND).sum()) for columns in timeline.program.columns)
    assert len(starts) == len(ends) == sends > 0
    assert starts.keys() == ends.keys()
    for number, start in starts.items():
        check_flow(slices, start, ends[number])


def check_flow(slices: list[dict[str, Any]], start: dict[str, Any], end: dict[str, Any]) -> None:
    """Both ends lie in slices of a send and its receive, on different ranks, and the arrow does not go back in time."""
    sent, received = (enclosing(slices, event) for event in (start, end))
    assert start["pid"] != end["pid"] and start["ts"] <= end["ts"] and end["bp"] == "e"
    send, receive = (re.fullmatch(r"(\d+)(SEND|RECV)_([FB])(\d+)", each["name"]) for each in (sent, received))
    assert send and receive and (send[2], receive[2]) == ("SEND", "RECV")
    assert send.group(3, 4) == receive.group(3, 4)
    assert int(receive[1]) - int(send[1]) == (1 if send[3] == "F" else -1)


def enclosing(slices: list[dict[str, Any]], event: dict[str, Any]) -> dict[str, Any]:
    found = [
        each
        for each in slices
        if (each["pid"], each["tid"]) == (event["pid"], event["tid"])
        and each["ts"] <= event["ts"] <= each["ts"] + each["dur"]
    ]
    assert found
    return next((each for each in found if each["ts"] == event["ts"]), found[-1])


def test_a_rank_that_was_not_recorded_is_left_out_of_the_trace(tmp_path: Path) -> None:
    whole = simulated("1f1b", 3, 4)
    blank = [np.full_like(whole.starts[1], np.nan) if rank == 1 else whole.starts[rank] for rank in range(3)]
    partial = fastpipe.Timeline(whole.program, blank, whole.ends, measured=True)
    events = json.loads(to_chrome_trace(partial, tmp_path / "t.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["ph"] == "X" and event["cat"] == "F"} == {0, 2}
    to_html(partial, tmp_path / "t.html")
    plot(partial, tmp_path / "t.png", transfers=True)


# Picture


def group(svg: str, name: str) -> str:
    """What is inside of all groups of an id."""
    parts = re.split(r'<g id="', svg)
    return "".join(part for part in parts if part.startswith(f'{name}"'))


@pytest.mark.without_torch
@pytest.mark.parametrize("name", NAMES)
def test_an_svg_has_a_box_for_every_bar_and_two_for_a_pair(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    timeline = simulated(name, 4, 8)
    svg = plot(timeline, tmp_path / "x.svg").read_text()
    ops = Counter(span.instruction.op.name for span in computes(timeline))
    pairs = ops.pop("OVERLAP_F_B", 0)
    for kind in ("F", "B", "I", "W"):
        expected = ops[kind] + (pairs if kind in ("F", "B") else 0)
        boxes = len(re.findall(r'<path d="M [^"]*z\s*"', group(svg, f"bars-{kind}")))
        assert boxes == expected, kind


def test_the_same_timeline_gives_the_same_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for suffix in (".png", ".svg", ".pdf"):
        one, two = (plot(simulated(), tmp_path / f"{n}{suffix}") for n in "ab")
        assert one.read_bytes() == two.read_bytes()
        assert one.stat().st_size > 5000


def test_a_picture_can_show_two_timelines_the_critical_path_and_transfers(tmp_path: Path) -> None:
    matplotlib_image = pytest.importorskip("matplotlib.image")
    one, two = simulated(comm=0.3), simulated("1f1b")
    single = matplotlib_image.imread(plot(one, tmp_path / "a.png"))
    both = matplotlib_image.imread(one.plot(tmp_path / "b.png", against=two, critical_path=True, transfers=True))
    assert both.shape[0] > 1.5 * single.shape[0]
    svg = fastpipe.plot(one, tmp_path / "c.svg", critical_path=True, transfers=True).read_text()
    assert 'id="critical-path"' in svg and 'id="transfers"' in svg


def test_many_bars_are_held_as_pixels(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    svg = plot(simulated("gpipe", 16, 700), tmp_path / "x.svg")
    assert svg.stat().st_size < 1_000_000
    assert "<image" in svg.read_text()


@pytest.mark.parametrize("path", ["x", "x.gif", "png", "x.png.txt"])
def test_a_suffix_that_is_no_format_is_refused(path: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"use one of \.png, \.svg, \.pdf"):
        plot(simulated(), tmp_path / path)


@pytest.mark.without_torch
def test_without_matplotlib_one_sentence_says_what_to_install(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install matplotlib"):
        plot(simulated(), tmp_path / "x.png")


# Page


def decoded(column: list[str]) -> Any:
    kind = np.dtype(column[0].removesuffix("Array").lower())
    return np.frombuffer(base64.b64decode(column[1]), dtype=kind.newbyteorder("<"))


@pytest.mark.parametrize("costs", [{}, {"forward": 1 / 3, "comm": 0.1}])
def test_the_page_holds_every_bar_exactly(costs: dict[str, float]) -> None:
    timeline = simulated(**costs)
    data, drawn = page_data(timeline), bars(timeline)
    assert np.array_equal(decoded(data["bars"]["start"]), drawn.start)
    assert np.array_equal(decoded(data["bars"]["end"]), drawn.end)
    assert decoded(data["bars"]["pairStage"]).tolist() == (drawn.pair_stage + 1).tolist()
    assert decoded(data["messages"]["start"]).size == len(transfers(timeline))
    assert decoded(data["memory"]["first"])[-1] == decoded(data["memory"]["time"]).size


@pytest.mark.without_torch
def test_the_page_is_one_file_that_needs_no_other(tmp_path: Path) -> None:
    text = to_html(simulated(), tmp_path / "x.html").read_text()
    assert not re.search(r"""(src|href)\s*=\s*["'](?!data:)""", text)
    assert "http" not in text and "@import" not in text and "{{" not in text and "/*{" not in text


def test_a_name_cannot_break_out_of_the_page(tmp_path: Path) -> None:
    order = ["0F0", "0B0"]
    name = "</script><script>alert(1)</script>"
    schedule = fastpipe.Schedule.from_actions(name, fastpipe.Placement.loop(1), 1, [order])
    text = to_html(fastpipe.simulate(schedule), tmp_path / "x.html").read_text()
    assert text.count("</script>") == 1 and "<script>alert" not in text


def test_a_name_from_a_file_that_is_no_utf8(tmp_path: Path) -> None:
    placement, orders = fastpipe.Placement.loop(1), [["0F0", "0B0"]]
    timeline = fastpipe.simulate(fastpipe.Schedule.from_actions("a\udc80", placement, 1, orders))
    path = to_html(timeline, tmp_path / "b\udc80.html")
    assert "<title>a?" in path.read_text(encoding="utf-8")


def test_a_name_is_not_the_mark_of_another_place_of_the_page(tmp_path: Path) -> None:
    name = "{{title}} /*{{style}}*/ /*{{script}}*/ /*{{data}}*/"
    schedule = fastpipe.Schedule.from_actions(name, fastpipe.Placement.loop(1), 1, [["0F0", "0B0"]])
    text = to_html(fastpipe.simulate(schedule), tmp_path / "x.html").read_text()
    assert f"<title>{name} - fastpipe</title>" in text and text.count(name) == 2 and text.count("\n/*{{") == 0


# Comparison


@pytest.mark.without_torch
def test_a_comparison_is_drawn_with_every_name(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = fastpipe.compare(["1f1b", "gpipe", "zbv", "dualpipev"], num_ranks=4, num_microbatches=8)
    path = pareto(rows, tmp_path / "x.svg")
    assert path.stat().st_size > 5000
    for row in rows:
        assert re.search(rf'id="name [^"]*\b{row.name}\b', path.read_text()), row.name
    assert "grey:" not in path.read_text()
    assert "grey: variants" in pareto(rows[:2], tmp_path / "x.svg", others=rows[2:]).read_text()
    with pytest.raises(ValueError, match="nothing to draw"):
        pareto([], tmp_path / "y.png")


@pytest.mark.without_torch
@pytest.mark.parametrize("width", [3.0, 8.0, 11.0])
def test_title_and_legend_fit_in_a_narrow_picture(
    width: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    figures: list[Any] = []
    monkeypatch.setattr("fastpipe.visualize.canvas.save", lambda figure, path, dpi: figures.append(figure) or path)
    plot(simulated(), tmp_path / "x.png", width=width, critical_path=True, transfers=True)
    figure = figures[0]
    figure.canvas.draw()
    (legend,), (title,) = figure.legends, figure.texts
    for part in (legend, title):
        box = part.get_window_extent().transformed(figure.dpi_scale_trans.inverted())
        assert box.x0 >= 0 and box.x1 <= width
    lowest = legend.get_window_extent().y0
    assert all(text.get_window_extent().y0 < lowest for axes in figure.axes for text in axes.texts)
    assert all(axes.get_window_extent().y1 < lowest for axes in figure.axes)


NAME = "cost $5 and \\$ $\\foo$ <b>&"


@pytest.mark.without_torch
def test_names_and_titles_are_drawn_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """matplotlib would read formulas between dollars, and refuse those that are none; SVG has no control characters."""
    figures = pytest.importorskip("matplotlib.figure")
    monkeypatch.setitem(__import__("matplotlib").rcParams, "svg.fonttype", "none")
    drawn: list[str] = []
    real = figures.Figure.savefig

    def saved(figure: Any, path: Path, **options: Any) -> None:
        real(figure, path, **options)
        shown = ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")
        drawn.append(" ".join("".join(text.itertext()) for text in shown))

    monkeypatch.setattr(figures.Figure, "savefig", saved)
    schedule = fastpipe.Schedule.from_actions(NAME, fastpipe.Placement.loop(1), 1, [["0F0", "0B0"]])
    timeline = fastpipe.simulate(schedule)
    plot(timeline, tmp_path / "x.svg")
    plot(simulated(), tmp_path / "x.svg", against=timeline, title=NAME + "\x01")
    plot(timeline, tmp_path / "x.svg", title=" ")
    pareto([Comparison(NAME, 1.0, 0.5, 1.0, 1)], tmp_path / "x.svg", title=NAME)
    assert [text.count(NAME) for text in drawn] == [1, 2, 0, 1]  # with a halo, the name of a point is a path


@pytest.mark.without_torch
@pytest.mark.parametrize("options", [{"against": "1f1b"}, {"title": 5}])
def test_what_is_drawn_has_its_type(options: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(TypeError, match=f"{next(iter(options))}: expected a .* or None, found"):
        plot(simulated(), tmp_path / "x.svg", **options)


@pytest.mark.parametrize(
    ("widths", "size"),
    [
        ([40.0] * 8, 9.0),  # all have room
        ([0.01] * 4 + [40.0] * 4, 6.5),  # forwards next to nothing: backwards still have their numbers
        ([0.01] * 7 + [40.0], 0.0),
        ([5.2] * 7 + [0.01], 5.2 / 0.95),
        ([2.0] * 8, 0.0),
        ([], 0.0),
    ],
)
def test_numbers_stand_where_they_fit(widths: list[float], size: float) -> None:
    wide = np.array(widths)
    assert font_size(wide, np.full(len(wide), 20.0), np.ones(len(wide), dtype=np.int64)) == pytest.approx(size)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(40, 460), st.floats(40, 260)), min_size=1, max_size=14))
def test_labels_cover_neither_points_nor_each_other(marks: list[tuple[float, float]]) -> None:
    page = Box(0, 0, 600, 400)
    boxes = place_labels(marks, [(60.0, 12.0)] * len(marks), page)
    for number, box in enumerate(boxes):
        assert box.inside(page)
        assert not any(box.overlaps(other) for other in boxes[:number])


# Grid


def test_the_grid_is_the_schedule_cell_by_cell() -> None:
    schedule = fastpipe.make_schedule("dualpipev", num_ranks=4, num_microbatches=8)
    for width in (None, 60):
        rows: dict[str, list[str]] = {}
        for line in grid(schedule, width=width).splitlines()[1:]:
            if line.startswith("rank"):
                rows.setdefault(line.split()[1], []).extend(line.split()[2:])
        for rank, row in enumerate(schedule.time_steps()):
            cells = ["." if action is None else "&".join(map(str, action.parts)) for action in row]
            assert rows[str(rank)] == cells


@pytest.mark.parametrize("width", [40, 80])
def test_a_grid_keeps_to_its_width_and_colour_changes_no_text(width: int) -> None:
    schedule = fastpipe.make_schedule("1f1b", num_ranks=4, num_microbatches=40)
    plain, painted = (grid(schedule, width=width, colour=colour) for colour in (False, True))
    assert all(len(line) <= width for line in plain.splitlines()[1:])
    assert re.sub(r"\x1b\[[0-9;]*m", "", painted) == plain
    assert painted != plain


# Pixels


def test_a_pixel_has_the_mean_colour_of_what_it_covers() -> None:
    drawn = bars(simulated("gpipe", 1, 2))  # F F B B: 1, 1, 2 and 2 seconds
    forward, backward = (np.flatnonzero(drawn.op == op) for op in (fastpipe.Op.F, fastpipe.Op.B))
    red, black = np.array([1.0, 0.0, 0.0]), np.zeros(3)
    parts = [(forward, red, True, True), (backward, black, True, False)]
    image = pixels(drawn, parts, longest=8.0, width=4, height=4, fill=1.0)
    upper, lower = image[0], image[3]
    assert upper.tolist() == [[1, 0, 0], [0, 0, 0], [0, 0, 0], [1, 1, 1]]
    assert lower.tolist() == [[1, 0, 0], [1, 1, 1], [1, 1, 1], [1, 1, 1]]
    wide = pixels(drawn, parts, longest=12.0, width=2, height=4, fill=1.0)
    assert wide[0, 0] == pytest.approx((2 * red + 4 * black) / 6)
    assert wide[3, 0] == pytest.approx((2 * red + 4 * np.ones(3)) / 6)
