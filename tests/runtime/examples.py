"""Examples as people run them: a script, alone or under torchrun, and what it prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.promptly import PATIENCE

REPOSITORY = Path(__file__).resolve().parents[2]


def run(name: str, *arguments: str, processes: int = 0) -> str:
    """What an example prints, which must succeed.

    Args:
        name: of the file in ``examples``.
        arguments: of the script.
        processes: how many under torchrun; 0 for one process without it.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes else []
    keep = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(
        [sys.executable, *launcher, str(REPOSITORY / "examples" / name), *arguments],
        env=keep | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def losses(shown: str) -> list[str]:
    """Those that were printed, step by step, to all their digits."""
    found = re.findall(r"^step +(\d+)  loss (\d+\.\d+)", shown, flags=re.MULTILINE)
    assert [int(step) for step, _ in found] == list(range(len(found))) and found, shown
    return [loss for _, loss in found]
