"""The interactive page in a real browser: real clicks, wheel and drag, and what is then on the screen."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import fastpipe
from fastpipe.visualize import to_html
from fastpipe.visualize.colours import COLOURS, CRITICAL, channels
from tests.browser.chromium import NAMES, Chromium, browser, find

pytestmark = pytest.mark.skipif(
    find() is None,
    reason=f"none of {', '.join(NAMES)} is installed: the interactive page is not checked in a browser "
    "(Debian and Ubuntu: apt install chromium)",
)


@pytest.fixture(scope="module")
def tab() -> Iterator[Chromium]:
    with browser() as running:
        yield running


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    schedule = fastpipe.make_schedule("dualpipev", num_ranks=4, num_microbatches=16)
    timeline = fastpipe.simulate(schedule, fastpipe.CostModel(comm=0.25))
    return to_html(timeline, tmp_path_factory.mktemp("page") / "small.html")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    schedule = fastpipe.make_schedule("1f1b", num_ranks=64, num_microbatches=512)
    return to_html(fastpipe.simulate(schedule), tmp_path_factory.mktemp("page") / "large.html")


def place(tab: Chromium, index: int) -> tuple[float, float]:
    found = tab.run(f"fastpipe.place({index})")
    return found["x"], found["y"]


def pixels(tab: Chromium, path: Path) -> npt.NDArray[np.int64]:
    from matplotlib.image import imread

    return np.rint(imread(tab.screenshot(path))[:, :, :3] * 255).astype(np.int64)


def count(image: npt.NDArray[np.int64], colour: str) -> int:
    return int((np.abs(image - np.array(channels(colour))).max(axis=2) <= 2).sum())


def test_it_draws_itself_without_errors_and_without_network(tab: Chromium, small: Path, tmp_path: Path) -> None:
    tab.requests.clear()
    tab.open(small)
    image = pixels(tab, tmp_path / "page.png")
    for kind in ("F", "B", "I", "W"):
        assert count(image, COLOURS[kind]) > 500, kind
    assert tab.errors == []
    assert [url for url in tab.requests if not url.startswith(("file:", "data:"))] == []
    assert "dualpipev" in tab.run("document.title")
    assert "makespan" in tab.run("document.getElementById('numbers').textContent")


def test_a_click_keeps_an_action_in_sight(tab: Chromium, small: Path) -> None:
    tab.open(small)
    index = tab.run("fastpipe.bars.first[1] + 20")
    tab.click(*place(tab, index))
    assert tab.run("fastpipe.state.selected") == index
    assert tab.run("fastpipe.state.rank") == 1
    text = tab.run("document.getElementById('selected').textContent")
    assert text.startswith(tab.run(f"fastpipe.label({index})"))
    assert "start" in text and "end" in text and "waited for" in text


def test_all_that_is_told_of_an_action_can_be_read_and_moves_nothing(tab: Chromium, small: Path) -> None:
    tab.open(small)
    height = tab.run("document.querySelector('footer').offsetHeight")
    longest, cut, twice, heights = tab.run("""(() => {
        const line = document.getElementById("selected"), heights = new Set();
        let longest = 0, cut = 0, twice = 0;
        for (let index = 0; index < fastpipe.bars.start.length; index++) {
            fastpipe.select(index);
            longest = Math.max(longest, line.title.length);
            cut += line.scrollHeight > line.clientHeight || line.scrollWidth > line.clientWidth;
            heights.add(document.querySelector("footer").offsetHeight);
            const needed = (line.title.split("also needed ")[1] || "").split("; ")[0].split(", ");
            twice += new Set(needed).size < needed.length;
        }
        return [longest, cut, twice, [...heights]];
    })()""")
    assert longest > 200 and (cut, twice) == (0, 0) and heights == [height]


def test_hovering_tells_start_end_and_what_it_waited_for(tab: Chromium, small: Path) -> None:
    tab.open(small)
    first = tab.run("fastpipe.bars.first[1]")
    tab.mouse("mouseMoved", *place(tab, first))
    tab.settle()
    tip = tab.run("document.getElementById('tip').innerText")
    assert tab.run("document.getElementById('tip').hidden") is False
    assert tip.splitlines()[0] == "1F0"
    assert "start 1.25 s, end 2.25 s, took 1 s" in tip
    assert "waited for 0F0 of rank 0, which ended at 1 s" in tip
    tab.mouse("mouseMoved", 5, 5)
    assert tab.run("document.getElementById('tip').hidden") is True


def test_hovering_over_a_gap_tells_how_long_it_is(tab: Chromium, small: Path) -> None:
    tab.open(small)
    x, y = place(tab, tab.run("fastpipe.bars.first[3]"))
    tab.mouse("mouseMoved", x - 25, y)
    assert tab.run("document.getElementById('tip').innerText").startswith("idle")


def test_the_wheel_zooms_around_the_cursor(tab: Chromium, small: Path) -> None:
    tab.open(small)
    before = tab.run("fastpipe.view.to - fastpipe.view.from")
    under = tab.run("timeAt(500)")
    tab.wheel(500, 150, -300)
    assert tab.run("fastpipe.view.to - fastpipe.view.from") < 0.8 * before
    assert tab.run("timeAt(500)") == pytest.approx(under, rel=1e-6)
    tab.wheel(500, 150, 2000)
    tab.wheel(500, 150, 2000)
    assert tab.run("fastpipe.view.to - fastpipe.view.from") == pytest.approx(before)


def test_dragging_moves_and_a_double_click_shows_everything(tab: Chromium, small: Path) -> None:
    tab.open(small)
    whole = tab.run("[fastpipe.view.from, fastpipe.view.to]")
    for _ in range(4):
        tab.wheel(700, 150, -300)
    start = tab.run("fastpipe.view.from")
    tab.drag((700, 150), (500, 150))
    assert tab.run("fastpipe.view.from") > start
    assert tab.run("fastpipe.state.selected") == -1
    tab.click(700, 150, count=2)
    assert tab.run("[fastpipe.view.from, fastpipe.view.to]") == whole


def test_the_critical_path_is_outlined_when_asked_for(tab: Chromium, small: Path, tmp_path: Path) -> None:
    tab.open(small)
    without = count(pixels(tab, tmp_path / "without.png"), CRITICAL)
    box = tab.run(
        "(({x, y, width, height}) => [x + width / 2, y + height / 2])"
        "(document.getElementById('show-critical').getBoundingClientRect())"
    )
    tab.click(*box)
    assert count(pixels(tab, tmp_path / "with.png"), CRITICAL) > without + 500


# How often a frame draws something.
CALLS = """(() => {
  let calls = 0;
  const own = CanvasRenderingContext2D.prototype, kept = {};
  for (const name of ["fillRect", "strokeRect", "fillText", "drawImage", "putImageData", "rect", "lineTo"]) {
    kept[name] = own[name];
    own[name] = function (...given) { calls += 1; return kept[name].apply(this, given); };
  }
  drawTimeline();
  drawMemory();
  Object.assign(own, kept);
  return calls;
})()"""


def test_64_ranks_and_512_microbatches_do_not_freeze(tab: Chromium, large: Path, tmp_path: Path) -> None:
    """A frame draws pixels where actions are narrow, and what is in sight: never all 65,536 actions."""
    tab.open(large)
    image = pixels(tab, tmp_path / "large.png")
    assert count(image, COLOURS["F"]) > 2000
    assert 0 < tab.run(CALLS) < 5000
    index = tab.run("fastpipe.bars.first[40] + 300")
    time = tab.run(f"fastpipe.bars.start[{index}]")
    tab.run(f"show({time - 10}, {time + 10})")
    tab.settle()
    tab.click(*place(tab, index))
    assert tab.run("fastpipe.state.selected") == index
    assert 0 < tab.run(CALLS) < 5000
    assert tab.errors == []
