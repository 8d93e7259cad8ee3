"""examples/train_gpt.py as a newcomer runs it: small, but whole."""

import importlib
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import skip_without_native
from tests.scripts import run

torch = pytest.importorskip("torch")

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = EXAMPLES / "train_gpt.py"
SMALL = ["--device", "cpu", "--width", "32", "--context", "32", "--sample", "8"]
STEPS = ["--steps", "3"]
PARTS = [
    "text",
    "model",
    "pipeline",
    "executor",
    "check",
    "validation",
    "bigram",
    "bubble",
    "picture",
    "plan",
    "sample",
]


def losses(shown: str) -> str:
    """Validation loss before and after, to the digits that are printed."""
    same = r"loss \d\.\d+, norm \d\.\d+ and \d+ gradients are those of the unsplit model, bit for bit"
    assert re.fullmatch(same, fact(shown, "check"))
    before, after = re.findall(r"^  validation  (\d\.\d{3})", shown, re.MULTILINE)
    assert float(after) < float(before)
    return f"{before} {after}"


def fact(shown: str, name: str) -> str:
    """What the report says about something, in one line: where lines end is a matter of the numbers in them."""
    found = re.search(rf"^  {name} +(.*(?:\n {{14}}.*)*)", shown, re.MULTILINE)
    assert found is not None, shown
    return re.sub(r"\n +", " ", found[1])


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """Run it in this process and give back what it printed."""
    patch, threads = pytest.MonkeyPatch(), torch.get_num_threads()
    patch.syspath_prepend(EXAMPLES)
    for name in ("RANK", "WORLD_SIZE"):
        patch.delenv(name, raising=False)
    patch.setenv("COLUMNS", "200")
    patch.setenv("MPLBACKEND", "agg")

    def run(*arguments: str) -> str:
        written = tmp_path_factory.mktemp("shown") / "output"
        with written.open("w") as stream, patch.context() as now:
            now.setattr(sys, "stdout", stream)
            length = [] if "--seconds" in arguments else STEPS
            out = ["--out", str(written.parent / "deep" / "folder")]
            now.setattr(sys, "argv", ["train_gpt.py", *SMALL, *length, *out, *arguments])
            example = importlib.import_module("train_gpt")
            now.setattr(example, "PLAN_ROUNDS", 1)
            example.run(example.main)
        return written.read_text()

    yield run
    patch.undo()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return ["--checkpoints", str(tmp_path_factory.mktemp("checkpoints")), "--save-every", "2"]


@pytest.fixture(scope="module")
def one_rank(here: Callable[..., str], checkpoints: list[str]) -> str:
    """What one rank shows; with its losses all others must agree."""
    return here("--ranks", "1", "--schedule", "1f1b", "--executor", "python", *checkpoints)


def test_the_report_is_whole(one_rank):
    for name in PARTS:
        assert re.search(rf"^  {name} ", one_rank, re.MULTILINE), name
    assert re.search(r"^  100%   step     3   loss .* tokens/s   measured bubble \d+%$", one_rank, re.MULTILINE)
    assert "\n  | def " in one_rank
    picture = re.search(r"^  picture +(\S+\.png),", one_rank, re.MULTILINE)
    assert picture is not None and Path(picture[1]).read_bytes().startswith(b"\x89PNG")


@pytest.fixture(scope="module")
def four_ranks(here: Callable[..., str]) -> str:
    """What four threads show with everything else as it is set."""
    return here("--ranks", "4", "--executor", "python")


def test_a_bubble_is_predicted_and_measured(four_ranks):
    shown = four_ranks
    times = r"predicted 11\.1% if .*, \d+\.\d% with their measured times measured +\d+\.\d%"
    assert re.match(times, fact(shown, "bubble"))
    gain = r"\d+\.\d -> \d+\.\d ms (a step )?\([-+]\d+\.\d%\)"
    found = re.fullmatch(
        rf".*: predicted {gain}, if every rank has a core measured +{gain}, the median of 1 in turns(; .*)?",
        fact(shown, "plan"),
    )
    assert found, fact(shown, "plan")
    assert bool(found.groups()[-1]) == ("4 ranks take turns" in fact(shown, "bubble"))


def test_threads_train_what_one_rank_trains(one_rank, four_ranks):
    """By the Python executor; processes with the native one are below."""
    assert losses(four_ranks) == losses(one_rank)


def test_a_run_that_was_interrupted_goes_on(one_rank, here, checkpoints):
    """As if it had ended after its first checkpoint, and with other ranks: the losses are those of a whole run."""
    folder = Path(checkpoints[1])
    assert sorted(path.name for path in folder.iterdir()) == ["step2", "step3"]
    shutil.rmtree(folder / "step3")
    shown = here("--ranks", "4", "--executor", "python", *checkpoints)
    assert fact(shown, "resumed") == f"from {folder / 'step2'}" and losses(shown) == losses(one_rank)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--microbatches 4", "num_microbatches = 4"),
        ("--schedule zigzag", "'zigzag'"),
        ("--schedule forward_only", "has no backward"),
        ("--layers 3", "3 layers"),
        ("--width 40", "width = 40"),
        ("--memory-copies 1", "start it with torchrun"),
    ],
)
def test_a_wrong_argument_ends_in_one_sentence(arguments, message, here):
    with pytest.raises(SystemExit) as ended:
        here(*arguments.split())
    assert message in str(ended.value) and "\n" not in str(ended.value)


def test_processes_train_what_one_rank_trains(one_rank: str, tmp_path: Path) -> None:
    skip_without_native()
    shown = run(SCRIPT, *SMALL, *STEPS, "--executor", "native", "--out", str(tmp_path), processes=2)
    assert losses(shown) == losses(one_rank)
