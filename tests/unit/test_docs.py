"""What the documents say is so: links lead somewhere, named files and names exist, examples run.

That generated pages are current is for `make lint` to say.
"""

import importlib
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

import fastpipe
from fastpipe.schedules import FAMILIES
from tests.conftest import HAS_TORCH

pytestmark = pytest.mark.without_torch

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "fastpipe"
FOLDERS = ("docs", "benchmarks")
PAGES = sorted([*REPOSITORY.glob("*.md"), *(page for name in FOLDERS for page in REPOSITORY.glob(f"{name}/**/*.md"))])
EXAMPLE = "fastpipe/schedules/eager.py"
"""The file that CONTRIBUTING.md writes as an example."""


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(path: Path) -> set[str]:
    """The anchors that a reader of Markdown gives to the headings."""
    headings = re.findall(r"^#+ (.*)$", without_code(path.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if target.startswith(("https://", "http://")):
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.exists(), f"{page.name} links to {target}"
        assert path.is_relative_to(REPOSITORY), target
        assert not anchor or anchor in anchors(path), f"{page.name} links to {target}, and there is no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_named_files_exist(page: Path) -> None:
    """A source in backticks is a file: a path from the root, the package or its runtime, or a bare name."""
    names = {
        path.name for folder in ("fastpipe", "csrc", "tests", *FOLDERS) for path in (REPOSITORY / folder).rglob("*")
    }
    for name in re.findall(r"`([\w/.-]+\.(?:py|cpp|h|md|toml|txt))`", without_code(page.read_text())):
        known = name in names or any((root / name).exists() for root in (REPOSITORY, PACKAGE, PACKAGE / "runtime"))
        assert known or name == EXAMPLE, f"{page.name} names {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_named_names_are_public(page: Path) -> None:
    text = re.sub(r"^```sh.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for name in set(re.findall(r"\bfastpipe\.([A-Za-z]\w*)\b", text)) - set(fastpipe.__all__):
        assert (PACKAGE / f"{name}.py").exists() or (PACKAGE / name).is_dir(), f"{page.name} names fastpipe.{name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), flags=re.MULTILINE))
    commands = [line for block in blocks(page, "sh") for line in block.splitlines()]
    assert {m[1] for line in commands if (m := re.match(r"make ([a-z-]+)", line))} <= targets


def test_every_example_is_in_the_table() -> None:
    scripts = {path.name for path in (REPOSITORY / "examples").glob("*.py") if "Pipeline(" in path.read_text()}
    table = (REPOSITORY / "docs/examples.md").read_text().partition("\n\nNone of them")[0]
    assert scripts == set(re.findall(r"^\| \[(\w+\.py)\]", table, flags=re.MULTILINE))


def test_the_page_of_examples_says_how_long_the_demo_takes() -> None:
    told = re.search(r"`make demo` trains for (\d+) seconds", (REPOSITORY / "docs/examples.md").read_text())
    script = (REPOSITORY / "examples/train_gpt.py").read_text()
    assert told and f'"--seconds", type=positive(float), default={told[1]}.0' in script


def test_the_index_has_every_page() -> None:
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", (REPOSITORY / "docs/README.md").read_text()))
    assert linked == {path.name for path in (REPOSITORY / "docs").glob("*.md")} - {"README.md"}


def script_of(name: str) -> dict[str, Any]:
    """A script of docs/, which imports its neighbours."""
    with patch.object(sys, "path", [str(REPOSITORY / "docs"), *sys.path]):
        return runpy.run_path(str(REPOSITORY / f"docs/{name}.py"))


def test_the_readme_s_figures_are_those_of_the_benchmarks() -> None:
    script = script_of("write_readme")
    readme, benchmarks = script["PAGE"].read_text(), script["BENCHMARKS"].read_text()
    assert set(re.findall(r"<!-- (\w+) -->", readme)) - {"end"} == set(script["FIGURES"])
    assert script["page"](readme, benchmarks) == readme
    other = re.sub(r"(-->)[^<>]+(<!-- end)", r"\g<1>0\2", readme)
    assert other != readme == script["page"](other, benchmarks)
    table = "| schedule | torch/fastpipe |\n| :-- | ---: |\n| GPipe | 2.34 (2.00..3.00) |\n| 1F1B | 12.6 (12..13) |\n"
    text = f"\n## overhead.py: a heading\n\n4 ranks\n\n2 ranks, 7 rounds\n\n{table}\n{table.replace('2.34', '1.00')}"
    assert script["FIGURES"]["overhead_2"](text) == "2.3 to 13"


def test_the_readme_fits_two_screens() -> None:
    assert len((REPOSITORY / "README.md").read_text().splitlines()) <= 120


def test_the_page_of_waves_has_an_example_that_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = blocks(REPOSITORY / "docs/waves.md", "python")
    exec(compile(example, "docs/waves.md", "exec"), {})
    assert capsys.readouterr().out.split() == re.findall(r"# (.*)$", example, flags=re.MULTILINE)[0].split()


def test_the_page_of_schedules_has_them_all() -> None:
    text = (REPOSITORY / "docs/schedules.md").read_text()
    assert re.findall(r"^### (.*)$", text, flags=re.MULTILINE) == list(FAMILIES)
    for family in FAMILIES.values():
        assert family.limits in text
        assert family.summary[1:] in text


def test_the_page_of_schedules_shows_commands_that_work() -> None:
    """Parsed, and their schedules generated; drawing takes long."""
    if not (PACKAGE / "cli").is_dir():
        pytest.skip("there is no command line yet")
    parse = importlib.import_module("fastpipe.cli.arguments").parser().parse_args
    lines = [line for block in blocks(REPOSITORY / "docs/schedules.md", "sh") for line in block.splitlines()]
    drawn, compared = (parse(line.split()[1:]) for line in lines)
    fastpipe.make_schedule(drawn.name, num_ranks=drawn.ranks, num_microbatches=drawn.microbatches)
    assert compared.names == ["all"]


def test_the_page_of_schedules_has_every_option_once() -> None:
    text = (REPOSITORY / "docs/schedules.md").read_text()
    for family in FAMILIES.values():
        section = text.partition(f"### {family.name}\n")[2].partition("\n### ")[0].replace("\n  ", " ")
        for name, option in family.options.items():
            assert f"`{name}={option.default!r}`" in section
            own, common = f"`: {option.text}\n", f"| `{name}` | {option.text.partition('; the order is')[0]} |"
            assert text.count(common) == 1 or own in section


def test_the_schedule_of_the_contributing_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, look = blocks(REPOSITORY / "CONTRIBUTING.md", "python")
    (tmp_path / "eager.py").write_text(source)
    family = runpy.run_path(str(tmp_path / "eager.py"))["EAGER"]
    monkeypatch.setitem(sys.modules, "fastpipe.schedules.eager", SimpleNamespace(EAGER=family))
    exec(compile(look, "CONTRIBUTING.md", "exec"), {})
    monkeypatch.setitem(FAMILIES, family.name, family)
    for ranks, microbatches in ((1, 1), (2, 1), (4, 3), (4, 16)):
        schedule = fastpipe.make_schedule("eager_1f1b", num_ranks=ranks, num_microbatches=microbatches)
        fastpipe.simulate(fastpipe.lower(schedule.validate()))
    slow = fastpipe.CostModel(comm=0.5)
    plain = fastpipe.make_schedule("1f1b", num_ranks=4, num_microbatches=16)
    assert fastpipe.simulate(schedule, slow).makespan < fastpipe.simulate(plain, slow).makespan


def test_a_row_of_the_page_on_choosing_is_current() -> None:
    """The quickest; the others come from the same function."""
    page = script_of("write_choosing")
    text, costs = next(iter(page["COSTS"].items()))
    assert page["row"](text, 1.0, page["plan"](costs, 1.0)) in page["PAGE"].read_text().splitlines()


def test_the_page_on_choosing_shows_commands_that_parse() -> None:
    parse = importlib.import_module("fastpipe.cli.arguments").parser().parse_args
    lines = [line for block in blocks(REPOSITORY / "docs/choosing-a-schedule.md", "sh") for line in block.splitlines()]
    assert len(lines) >= 3
    for line in lines:
        parse(line.split()[1:])
    fastpipe.LayerCosts.from_json(REPOSITORY / "docs/layers.json")


def test_the_page_on_choosing_has_code_that_runs() -> None:
    code, running = blocks(REPOSITORY / "docs/choosing-a-schedule.md", "python")
    exec(compile(code, "choosing-a-schedule.md", "exec"), {})
    if HAS_TORCH:
        names: dict[str, Any] = {}
        exec(compile(running, "choosing-a-schedule.md", "exec"), names)
        assert names["pipe"].schedule == names["plan"].schedule
