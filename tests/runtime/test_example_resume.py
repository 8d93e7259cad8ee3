"""examples/resume.py: stopped and started again with other ranks, it goes on as if it had not been."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.examples import run

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def resume(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("resume")


def test_it_goes_on_with_other_ranks(resume: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def start(folder: str, ranks: int, schedule: str, until: int) -> list[float]:
        options = {"folder": tmp_path / folder, "ranks": ranks, "schedule": schedule, "until": until}
        return list(resume.main([text for name, value in options.items() for text in (f"--{name}", str(value))]))

    parts = [start("a", 4, "dualpipev", 4), start("a", 2, "1f1b", 7), start("a", 1, "gpipe", 8)]
    said = capsys.readouterr().out
    assert [len(part) for part in parts] == [4, 3, 1]
    assert "dualpipev on 4 ranks, from the start" in said and "gpipe on 1 ranks, from step7" in said
    whole = start("b", 2, "zbv", 8)
    assert [loss for part in parts for loss in part] == whole
    assert whole[-1] < 0.8 * whole[0]
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["step3", "step4", "step6", "step7", "step8"]


def printed(shown: str) -> list[str]:
    return re.findall(r"^  step +\d+  loss (\d+\.\d+)$", shown, flags=re.MULTILINE)


def test_processes_go_on_where_threads_stopped(tmp_path: Path) -> None:
    one = ["--folder", str(tmp_path / "a"), "--until"]
    begun = run("resume.py", *one, "3", "--ranks", "4", "--schedule", "dualpipev")
    went_on = run("resume.py", *one, "5", "--schedule", "1f1b", processes=2)
    assert "1f1b on 2 ranks, from step3" in went_on
    whole = run("resume.py", "--folder", str(tmp_path / "b"), "--until", "5", "--ranks", "1", "--schedule", "gpipe")
    assert len(printed(whole)) == 5 and printed(begun) + printed(went_on) == printed(whole)
