"""Examples as people run them: alone and as several processes they print the same; resume.py goes on where it was."""

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.examples import REPOSITORY, losses, run

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def resume(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(REPOSITORY / "examples")
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


def test_shards_train_what_one_process_trains() -> None:
    shown, alone = run("fsdp.py", "--steps", "3", processes=4), run("fsdp.py", "--steps", "3")
    assert "replicas: 2; ranks of each: 2" in shown and "replicas: 1" in alone
    for spread, whole in zip(losses(shown), losses(alone), strict=True):
        assert float(spread) == pytest.approx(float(whole), rel=1e-4)
    ((held, total),), ((all_held, same),) = (
        re.findall(r"holds ([\d,]+) of ([\d,]+) parameters", text) for text in (shown, alone)
    )
    assert all_held == same == total
    assert int(held.replace(",", "")) < 0.3 * int(total.replace(",", ""))
    assert re.findall(r"norm of the gradients (\S+)", shown) == re.findall(r"norm of the gradients (\S+)", alone)


def test_a_llama_trains_and_goes_on_without_a_pipeline() -> None:
    shown, alone = (run("train_llama.py", "--steps", "3", "--ranks", "2", processes=count) for count in (2, 0))
    for text in (shown, alone):
        assert "gradients are those of the unsplit model, bit for bit" in text
        assert "tied        model.embed_tokens.weight = lm_head.weight (stages [0, 3])" in text
        pipeline, plain = re.findall(r"pipeline's loss (\S+); the plain model's, from its checkpoint, (\S+)", text)[0]
        assert float(pipeline) == pytest.approx(float(plain), abs=2e-4)
        assert "it writes: 'def read" in text
    assert losses(shown) == losses(alone)
    assert float(losses(shown)[-1]) < float(losses(shown)[0])
