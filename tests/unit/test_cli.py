"""The command: what it prints, what it writes, and what it says of bad input."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fastpipe
from fastpipe.cli import main, work
from fastpipe.cli.arguments import parser
from fastpipe.cli.checks import FORMATS, diagnosis
from tests.patience import PATIENCE

SMALL = ["--ranks", "4", "--microbatches", "8"]
PRINTING = ("schedules", "show", "simulate", "compare", "validate", "convert")
COMMANDS = (*PRINTING, "plan", "plot", "html", "trace", "doctor")


def run(capsys: Any, *arguments: str) -> str:
    """What the command prints when all is well: nothing on the standard error."""
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return str(captured.out)


def refused(capsys: Any, *arguments: str) -> str:
    """The one line of a refusal, which has status 2."""
    try:
        status = main(arguments)
    except SystemExit as leaving:  # argparse's way
        status = int(leaving.code or 0)
    captured = capsys.readouterr()
    assert (status, captured.out) == (2, "")
    assert captured.err.startswith("fastpipe") and captured.err.count("\n") == 1, captured.err
    return str(captured.err)


@pytest.fixture
def csv(tmp_path: Path) -> str:
    path = tmp_path / "mine.csv"
    fastpipe.make_schedule("zbv", num_ranks=4, num_microbatches=8).to_csv(path)
    return str(path)


# What is printed


def test_schedules_lists_every_one(capsys: Any) -> None:
    out = run(capsys, "schedules")
    for family in fastpipe.list_schedules():
        assert f"{family.name}: " in out
    listed = json.loads(run(capsys, "schedules", "--json"))
    assert [entry["name"] for entry in listed] == [family.name for family in fastpipe.list_schedules()]
    assert "stages_per_rank" in json.loads(run(capsys, "schedules", "interleaved_1f1b", "--json"))[0]["options"]


def test_show_prints_the_grid(capsys: Any) -> None:
    out = run(capsys, "show", "1f1b", *SMALL)
    assert out.split() == str(fastpipe.make_schedule("1f1b", num_ranks=4, num_microbatches=8)).split()


def test_show_paints_only_where_colours_are_shown(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for variable, value, paints in (("TERM", "xterm", True), ("TERM", "dumb", False), ("NO_COLOR", "1", False)):
        monkeypatch.delenv("NO_COLOR", raising=False)
        monkeypatch.setenv(variable, value)
        assert ("\x1b" in run(capsys, "show", "1f1b", *SMALL)) == paints


def test_show_takes_options_by_both_ways(capsys: Any) -> None:
    by_flag = run(capsys, "show", "interleaved_1f1b", *SMALL, "--stages-per-rank", "3")
    by_option = run(capsys, "show", "interleaved_1f1b", *SMALL, "--option", "stages_per_rank=3")
    assert by_flag == by_option != run(capsys, "show", "interleaved_1f1b", *SMALL)


def test_show_prints_a_program(capsys: Any) -> None:
    program = fastpipe.lower(fastpipe.make_schedule("1f1b", num_ranks=4, num_microbatches=8))
    assert run(capsys, "show", "1f1b", *SMALL, "--program", "2") == f"{program[2]}\n"
    found = json.loads(run(capsys, "show", "1f1b", *SMALL, "--program", "2", "--json"))
    assert [each["op"] for each in found["instructions"]] == [each.op.name for each in program[2]]


def test_simulate_prints_what_the_timeline_says(capsys: Any) -> None:
    schedule = fastpipe.make_schedule("1f1b", num_ranks=4, num_microbatches=8)
    timeline = fastpipe.simulate(schedule, fastpipe.CostModel(forward=2, backward=3, comm=0.5))
    costs = ["--forward", "2", "--backward", "3", "--comm", "0.5"]
    found = json.loads(run(capsys, "simulate", "1f1b", *SMALL, *costs, "--json", "--steps"))
    assert found["makespan"] == timeline.makespan
    assert found["bubble_fraction"] == timeline.bubble_fraction
    assert found["peak_activations"] == list(timeline.peak_activations)
    assert len(found["spans"]) == 64
    out = run(capsys, "simulate", "1f1b", *SMALL, *costs, "--steps")
    assert f"makespan {timeline.makespan:.6g}" in out and str(timeline) in out


def test_costs_come_from_a_file_and_the_command_line_goes_over_them(capsys: Any, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"forward": 5, "backward_input": [1, 2, 3, 4]}))
    arguments = ["simulate", "1f1b", *SMALL, "--json", "--costs", str(path)]
    expected = fastpipe.CostModel(forward=5, backward_input=(1, 2, 3, 4))
    timeline = fastpipe.simulate(fastpipe.make_schedule("1f1b", num_ranks=4, num_microbatches=8), expected)
    assert json.loads(run(capsys, *arguments))["makespan"] == timeline.makespan
    assert json.loads(run(capsys, *arguments, "--forward", "1"))["makespan"] < timeline.makespan


def test_a_generator_gets_the_costs_of_the_file_too(capsys: Any, tmp_path: Path) -> None:
    """Also those by stage where it takes one per rank; and of a stage where two schedules share a model."""
    path = tmp_path / "costs.json"
    costs = {"forward": [4, 1, 1, 1], "backward_input": 3, "comm": 0.5}
    path.write_text(json.dumps(costs))
    schedule = fastpipe.make_schedule("zb_auto", num_ranks=4, num_microbatches=12, **costs)
    assert schedule != fastpipe.make_schedule("zb_auto", num_ranks=4, num_microbatches=12)
    expected = [list(map(str, rank)) for rank in schedule]
    numbers = ["--ranks", "4", "--microbatches", "12", "--json"]
    flags = ["--forward", "4,1,1,1", "--backward-input", "3", "--comm", "0.5"]
    for source in (["--costs", str(path)], flags):
        spans = json.loads(run(capsys, "simulate", "zb_auto", *numbers, *source, "--steps"))["spans"]
        assert [[span["action"] for span in spans if span["rank"] == rank] for rank in range(4)] == expected

    flags = ["--forward", "2", "--backward-input", "3", "--comm", "0.5"]
    beside = ["--against", "1f1b", "-o", str(tmp_path / "both.svg")]
    rows = json.loads(run(capsys, "compare", "zbv", *numbers, *flags))
    assert json.loads(run(capsys, "plot", "zbv", *numbers, *flags, *beside))["makespan"] == rows[0]["makespan"]


def test_compare_puts_schedules_side_by_side(capsys: Any) -> None:
    rows = {row["name"]: row for row in json.loads(run(capsys, "compare", "gpipe", "1f1b", "zbv", *SMALL, "--json"))}
    assert set(rows) == {"gpipe", "1f1b", "zbv"}
    assert rows["gpipe"]["bubble_fraction"] == pytest.approx(3 / 11)
    assert rows["zbv"]["best"] and not rows["gpipe"]["best"]
    assert (rows["gpipe"]["peak_memory"], rows["1f1b"]["peak_memory"]) == (8, 4)


def test_compare_all_tells_which_are_not_possible(capsys: Any, tmp_path: Path) -> None:
    picture = tmp_path / "pareto.png"
    out = run(capsys, "compare", "all", "--ranks", "4", "--microbatches", "3", "--plot", str(picture))
    names = {family.name for family in fastpipe.list_schedules()}
    assert all(name in out for name in names)
    assert "dualpipev not possible: " in out and "1f1b " in out
    assert picture.stat().st_size > 5000


def test_costs_of_a_share_are_those_of_the_stages_that_are_asked_for() -> None:
    """A generator that looks at costs is given those of a stage, however many stages a rank is to hold."""
    command = ["plot", "wave_zb", "--ranks", "4", "--microbatches", "8", "--stages-per-rank", "2", "-o", "x.png"]
    cost = fastpipe.CostModel(forward=3, comm=0.1)
    schedule = work.schedule_of(parser().parse_args(command), cost=cost, share=True)
    options = {"stages_per_rank": 2, "forward": 1.5, "backward_input": 0.5, "backward_weight": 0.5, "comm": 0.1}
    assert schedule.options == options


@pytest.mark.without_torch
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_json_and_examples_that_run(command: str, capsys: Any, csv: str, monkeypatch: Any) -> None:
    monkeypatch.chdir(Path(csv).parent)
    Path("costs.json").write_text('{"forward": 1.5}')
    with pytest.raises(SystemExit) as leaving:
        main([command, "--help"])
    assert leaving.value.code == 0
    text = capsys.readouterr().out
    assert "--json" in text
    examples = [line.split()[1:] for line in text.split("examples:")[1].splitlines() if "fastpipe " in line]
    assert examples
    for example in examples:
        if "mine.json" in example[1:2]:
            main(["convert", "mine.csv", "-o", "mine.json"])
        assert main(example) == 0, example
    assert capsys.readouterr().err == ""


# What is written


@pytest.mark.parametrize(("command", "suffix"), [("plot", ".png"), ("html", ".html"), ("trace", ".json")])
def test_files_are_written_and_named(command: str, suffix: str, capsys: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert f"wrote dualpipev-4x8{suffix}\n" in run(capsys, command, "dualpipev", *SMALL)
    assert (tmp_path / f"dualpipev-4x8{suffix}").stat().st_size > 5000
    other = tmp_path / f"other{suffix}"
    found = json.loads(run(capsys, command, "dualpipev", *SMALL, "-o", str(other), "--json"))
    assert found["path"] == str(other) and found["bytes"] == other.stat().st_size


def test_sizes_that_memory_cannot_hold(capsys: Any) -> None:
    size = ("--ranks", "99999999", "--microbatches", "8")
    for command in (("simulate", "1f1b"), ("compare", "1f1b", "gpipe"), ("plan",)):
        assert "num_ranks = 99999999: there are at most 1,000,000" in refused(capsys, *command, *size)


def test_validate_says_what_is_right_and_what_is_wrong(capsys: Any, csv: str) -> None:
    assert "valid: 4 ranks, 8 stages, 8 microbatches" in run(capsys, "validate", csv)
    assert json.loads(run(capsys, "validate", csv, "--json"))["valid"] is True
    assert "with 1 hardware queue for the streams of a rank" in run(capsys, "validate", csv, "--queues", "1")
    assert "--queues: 'x': give a whole number from 1" in refused(capsys, "validate", csv, "--queues", "x")
    path = Path(csv)
    path.write_text(path.read_text().replace("7I3,", "", 1))
    for command in (["validate", csv], ["simulate", csv], ["convert", csv, "--to", "comms"]):
        assert f"error: {csv}: rank 0: stage 7, microbatch 3 has no I" in refused(capsys, *command)
    path.write_text("0F0,oops\n")
    assert "row 1, column 2" in refused(capsys, "validate", csv)


@pytest.mark.parametrize(
    "command",
    [
        ("convert", "FILE.csv", "--to", "json", "-o", "FULL"),
        ("html", "1f1b", *SMALL, "-o", "FULL"),
        ("trace", "1f1b", *SMALL, "-o", "FULL"),
        ("plan", *SMALL, "--effort", "0", "--csv", "FULL"),
    ],
    ids=lambda command: command[0],
)
def test_a_full_disk_is_named(command: tuple[str, ...], capsys: Any, csv: str) -> None:
    words = [{"FILE.csv": csv, "FULL": "/dev/full"}.get(word, word) for word in command]
    assert "error: /dev/full: No space left on device" in refused(capsys, *words)


@pytest.mark.parametrize("to", FORMATS)
def test_convert_and_back_gives_the_same(to: str, capsys: Any, csv: str, tmp_path: Path) -> None:
    text = run(capsys, "convert", csv, "--to", to)
    suffix = ".json" if to in ("json", "program") else ".csv"
    path = tmp_path / f"converted{suffix}"
    assert run(capsys, "convert", csv, "--to", to, "-o", str(path)) == f"wrote {path}\n"
    assert path.read_text() == text
    if to == "program":
        assert fastpipe.Program.from_json(path).num_ranks == 4
        return
    run(capsys, "validate", str(path))
    if to != "comms":
        assert run(capsys, "convert", str(path), "--to", "csv") == Path(csv).read_text()


def test_a_dash_is_the_standard_output_and_no_file(capsys: Any, csv: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert run(capsys, "convert", csv, "--to", "json", "-o", "-") == run(capsys, "convert", csv, "--to", "json")
    for command in ("plot", "html", "trace"):
        for name in ("-", ""):
            assert f"{name!r} is no file" in refused(capsys, command, "1f1b", "-p", "2", "-m", "2", "-o", name)
    for flag in ("--plot", "--csv", "--html"):
        assert f"{flag}: '' is no file" in refused(capsys, "plan", "-p", "2", "-m", "2", flag, "")
    assert "--plot: '' is no file" in refused(capsys, "compare", "1f1b", "-p", "2", "-m", "2", "--plot", "")
    assert sorted(tmp_path.iterdir()) == before


def test_a_file_whose_name_is_no_utf8(capsys: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "a\udc80.csv")
    Path(path).write_text("0F0,0B0\n")
    assert "a\\udc80" in run(capsys, "show", path)
    assert "a\\udc80.html" in run(capsys, "html", path, "-o", path.replace(".csv", ".html"))


@pytest.mark.without_torch
def test_doctor_looks_at_everything(capsys: Any) -> None:
    found = diagnosis()
    assert found["fastpipe"] == fastpipe.__version__
    assert isinstance(found["advice"], list)
    assert found["native"] in run(capsys, "doctor")
    assert json.loads(run(capsys, "doctor", "--json"))["native"] == found["native"]
    assert found["private"].startswith("all " if found["torch"] else "not looked for")


def test_a_warning_is_one_line_and_no_error(capsys: Any, tmp_path: Path) -> None:
    path = tmp_path / "late.csv"
    path.write_text("0F0,0F1,0I0,0I1,0W1,0W0\n")
    assert main(["validate", str(path)]) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("fastpipe: warning: ") and captured.err.count("\n") == 1


@pytest.mark.parametrize(("command", "by_stage"), [("simulate", True), ("compare", False)])
def test_help_says_whether_costs_can_be_by_stage(command: str, by_stage: bool, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert ("one per stage" in capsys.readouterr().out) == by_stage


# Bad input


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "COMMAND"),
        (["nonsense"], "nonsense"),
        (["show"], "NAME"),
        (["show", "1f1b"], "--ranks"),
        (["show", "nope", *SMALL], "nope"),
        (["show", "nope"], "no such schedule"),
        (["schedules", "nope"], "no such schedule"),
        (["show", "missing.CSV"], "error: missing.CSV: No such file"),
        (["validate", ""], "path = '': give the name of a file"),
        (["plot", "1f1b", "-p", "2", "-m", "2", "--against", ""], "schedule name = ''"),
        (["show", "1f1b", "--ranks", "0", "--microbatches", "8"], "--ranks"),
        (["show", "1f1b", "--ranks", "4", "--microbatches", "eight"], "eight"),
        (["show", "1f1b", "--ranks", "9999999999", "--microbatches", "8"], "from 1 to 999999999"),
        (["show", "1f1b", "--ranks", "99999999", "--microbatches", "99999999"], "ask for fewer"),
        (["show", "1f1b", *SMALL, "--option", "stages_per_rank"], "NAME=VALUE"),
        (["show", "1f1b", *SMALL, "--option", "colour=3"], "colour"),
        (["show", "wave_zb", *SMALL, "--option", "memory=8", "--option", "memory=9"], "8 and 9: give it once"),
        (["show", "wave_zb", *SMALL, "--option", "stages_per_rank=2", "--stages-per-rank", "4"], "2 and 4: give"),
        (["show", "1f1b", *SMALL, "--program", "4"], "0 to 3"),
        (["show", "dualpipev", "--ranks", "4", "--microbatches", "3"], "num_microbatches"),
        (["show", "missing.csv"], "missing.csv"),
        (["show", "missing.csv", *SMALL], "--ranks"),
        (["simulate", "1f1b", *SMALL, "--forward", "-1"], "forward"),
        (["simulate", "1f1b", *SMALL, "--forward", "nan"], "forward"),
        (["simulate", "1f1b", *SMALL, "--forward", "1,2"], "forward"),
        (["simulate", "1f1b", *SMALL, "--comm", "1,2,3"], "comm"),
        (["simulate", "1f1b", *SMALL, "--costs", "missing.json"], "missing.json"),
        (["simulate", "1f1b", *SMALL, "--lanes", "odd"], "odd"),
        (["simulate", "1f1b", *SMALL, "--recv-lookahead", "-1"], "recv-lookahead"),
        (["compare", "1f1b", "nope", *SMALL], "nope"),
        (["compare", "all", "nope", *SMALL], "nope"),
        (["compare", "1f1b", *SMALL, "--forward", "1,1,1,1"], "forward"),
        (["compare", "1f1b", *SMALL, "--plot", "x.gif"], ".png"),
        (["plan", "--ranks", "4"], "error: --microbatches: give it, or with --costs"),
        (["plot", "1f1b", *SMALL, "-o", "x.gif"], ".png"),
        (["plot", "1f1b", *SMALL, "-o", "/no/such/folder/x.png"], "/no/such/folder"),
        (["plot", "1f1b", *SMALL, "--width", "0"], "inches"),
        (["plot", "1f1b", *SMALL, "--width", "1"], "inches"),
        (["html", "1f1b", *SMALL, "-o", "/no/such/folder/x.html"], "/no/such/folder"),
        (["validate", "missing.csv"], "missing.csv"),
        (["convert", "missing.json"], "missing.json"),
        (["convert", "mine.csv", "-o", "mine.svg"], "use .csv or .json"),
        (["doctor", "--loud"], "--loud"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    arguments: list[str], named: str, capsys: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert named in refused(capsys, *arguments)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"orders": 3}', '{"num_ranks": 1, "orders": [["0F0"]]}', "[" * 10000])
def test_json_that_is_no_schedule_is_refused(text: str, capsys: Any, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    assert "mine.json" in refused(capsys, "convert", str(path))


def test_json_of_a_schedule_says_one_thing(capsys: Any, csv: str, tmp_path: Path) -> None:
    """What it says beside the orders is compared with them; nothing in it is ignored."""
    document = json.loads(run(capsys, "convert", csv, "--to", "json"))
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(document), encoding="utf-8-sig")
    assert json.loads(run(capsys, "convert", str(path), "--to", "json")) == document
    for entry, message in (
        ({"num_stages": 7}, "num_stages = 7: the rest says 8"),
        ({"speed": 1}, "there is no entry 'speed'"),
        ({"orders": [[list(fastpipe.Action.parse("0F0"))], [], [], []]}, "orders = "),
        ({"orders": ["0F0,0B0", "", "", ""]}, "rank 0: give each action as an Action or its text: found the text"),
    ):
        path.write_text(json.dumps({**document, **entry}))
        assert message in refused(capsys, "validate", str(path))


def test_a_name_with_a_slash_leads_to_no_other_folder(capsys: Any, csv: str, tmp_path: Path, monkeypatch: Any) -> None:
    document = json.loads(run(capsys, "convert", csv, "--to", "json"))
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    Path("mine.json").write_text(json.dumps({**document, "name": "../mine"}))
    assert run(capsys, "trace", "mine.json").endswith("wrote .._mine-4x8.json\n")
    assert Path(".._mine-4x8.json").exists() and not list(tmp_path.glob("*.json"))


NAMES = ["1f1b", "zbv", "dualpipev", "nope", "all", ""]
FLAGS = ["--ranks", "--microbatches", "--json", "--option", "--forward", "--comm", "--costs", "--program", "--lanes"]
VALUES = ["4", "8", "0", "-3", "1e9", "inf", "stages_per_rank=2", "=", "pair", "--"]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(command=st.sampled_from(PRINTING), words=st.lists(st.sampled_from(NAMES + FLAGS + VALUES), max_size=9))
def test_no_arguments_whatever_bring_a_traceback(command: str, words: list[str], capsys: Any) -> None:
    try:
        status = main([command, *words])
    except SystemExit as leaving:
        status = int(leaving.code or 0)
    captured = capsys.readouterr()
    assert status in (0, 2)
    if status == 2:
        assert captured.err.count("\n") == 1 and captured.out == ""
    elif "--json" in words and "--" not in words:
        json.loads(captured.out)


# As a process


def process(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fastpipe", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False, **more)


def test_it_runs_as_a_module_and_pipes_cleanly() -> None:
    done = process("show", "1f1b", *SMALL)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout and done.stdout.count("\n") == 5
    bad = process("show", "nope", *SMALL)
    assert bad.returncode == 2 and bad.stdout == "" and "Traceback" not in bad.stderr


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = f"{sys.executable} -m fastpipe show gpipe --ranks 32 --microbatches 500 | head -c 100"
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert len(done.stdout) == 100
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "unbuffered"),
    [(f"show 1f1b {' '.join(SMALL)}", ""), (f"show 1f1b {' '.join(SMALL)}", "1"), ("--help", ""), ("--version", "1")],
)
def test_a_full_standard_output_is_named(arguments: str, unbuffered: str) -> None:
    command = f"PYTHONUNBUFFERED={unbuffered} {sys.executable} -m fastpipe {arguments} > /dev/full"
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stderr) == (2, "fastpipe: error: standard output: No space left on device\n")


WITHOUT = """
import sys
for name in {missing!r}:
    sys.modules[name] = None
from fastpipe.cli import main
status = main({arguments!r})
assert "torch" not in [name for name, module in sys.modules.items() if module is not None]
sys.exit(status)
"""


def without(missing: Sequence[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    script = WITHOUT.format(missing=list(missing), arguments=list(arguments))
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE, check=False)


def test_it_needs_neither_rich_nor_matplotlib_nor_torch(tmp_path: Path) -> None:
    missing = ("rich", "matplotlib", "torch")
    for command in (["simulate", "zbv", *SMALL], ["compare", "all", *SMALL], ["schedules"]):
        done = without(missing, *command)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
    done = without(missing, "plot", "zbv", *SMALL, "-o", str(tmp_path / "x.png"))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "pip install matplotlib" in done.stderr


# Plans


def test_plan_prints_and_writes(capsys: Any, tmp_path: Path) -> None:
    out = run(capsys, "plan", *SMALL, "--memory", "0.75", "--effort", "0.02", "--csv", str(tmp_path / "plan.csv"))
    assert out.startswith("Plan for 4 ranks, 8 microbatches, memory 0.75 of 1F1B's") and "plan.csv" in out
    assert fastpipe.Schedule.from_csv(tmp_path / "plan.csv").validate().num_ranks == 4
    options = ["--forward", "1", "--comm", "0.1", "--effort", "0.02", "--html", str(tmp_path / "plan.html"), "--json"]
    found = json.loads(run(capsys, "plan", *SMALL, *options))
    assert found["gap"] >= 0 and found["candidates"][0]["chosen"] and found["schedule"]["num_ranks"] == 4
    assert "<html" in (tmp_path / "plan.html").read_text()


def test_plan_takes_layers_from_a_file(capsys: Any, tmp_path: Path) -> None:
    path = tmp_path / "layers.json"
    path.write_text(json.dumps({"num_layers": 8, "held_bytes": 1e6, "batch_size": 8}))
    options = ["--ranks", "4", "--costs", str(path), "--memory", "8MB", "--effort", "0"]
    found = json.loads(run(capsys, "plan", *options, "--json"))
    assert found["partition"][0][0] == 0 and found["partition"][-1][1] == 8
    assert "has costs of layers; write it there" in refused(capsys, "plan", *options, "--forward", "2")
    assert "memory = " in refused(capsys, "plan", *SMALL, "--memory", "lots")
