"""A job that is started again with fewer ranks, or with more, plans anew and goes on with the same losses."""

import json
from pathlib import Path
from typing import Any

from tests.scripts import run

SCRIPT = Path(__file__).with_name("resized.py")


def train(folder: Path, until: int, processes: int) -> Any:
    """What the script says of its run."""
    return json.loads(run(SCRIPT, str(folder), str(until), processes=processes).splitlines()[-1])


def test_four_ranks_then_three_then_four(tmp_path: Path) -> None:
    """Not close: the same, since all sums have one order, whoever computes them. (The plan holds no stage twice.)"""
    for name in ("undisturbed", "resized"):
        (tmp_path / name).mkdir()
    expected = train(tmp_path / "undisturbed", 6, 4)
    runs = [train(tmp_path / "resized", until, size) for until, size in ((2, 4), (4, 3), (6, 4))]
    assert [(one["ranks"], one["planned"]) for one in runs] == [(4, False), (3, True), (4, True)]
    assert [loss for one in runs for loss in one["losses"]] == expected["losses"]
