"""Examples as people run them: a script, alone or under torchrun, and what it prints."""

import re
from pathlib import Path

from tests import scripts

REPOSITORY = Path(__file__).resolve().parents[2]


def run(name: str, *arguments: str, processes: int = 0) -> str:
    """What an example prints, which must succeed; `processes` as for `tests.scripts.run`."""
    return scripts.run(REPOSITORY / "examples" / name, *arguments, processes=processes)


def losses(shown: str) -> list[str]:
    """Those that were printed, step by step, to all their digits."""
    found = re.findall(r"^step +(\d+)  loss (\d+\.\d+)", shown, flags=re.MULTILINE)
    assert [int(step) for step, _ in found] == list(range(len(found))) and found, shown
    return [loss for _, loss in found]
