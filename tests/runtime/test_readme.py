"""README and docs are run as they stand: every Python block, every shell command, the quickstart both ways."""

import ast
import os
import re
import shlex
import stat
import sys
from pathlib import Path

import pytest

from tests import scripts
from tests.scripts import REPOSITORY

README = (REPOSITORY / "README.md").read_text()
EXAMPLES_OF = ("guide", "training", "hugging-face", "planning", "guarantees", "integrations")
"""Pages whose Python blocks run alone, in one process. Other tests run those of the other pages."""
COMMANDS_OF = ("install", "planning", "command-line")
QUICKSTART_LINES = 20
NOT_RUN = ("make", "pip")
"""Commands that set things up: the tests of the build and continuous integration run those."""

PROGRAMS = {
    "python": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
    "fastpipe": [sys.executable, "-m", "fastpipe"],
}


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


PAGES = {name: (REPOSITORY / f"docs/{name}.md").read_text() for name in {*EXAMPLES_OF, *COMMANDS_OF}}
(QUICKSTART,) = blocks(README, "python")
EXAMPLES = [
    pytest.param(block, id=f"{name}-{number}")
    for name in EXAMPLES_OF
    for number, block in enumerate(blocks(PAGES[name], "python"), start=1)
]
SHELL = [
    line
    for text in (README, *(PAGES[name] for name in COMMANDS_OF))
    for block in blocks(text, "sh")
    for line in block.splitlines()
    if line.strip()
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder to run in: the examples are there, and so are the programs, whatever the environment calls them."""
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    (tmp_path / "bin").mkdir()
    for name, command in PROGRAMS.items():
        program = tmp_path / "bin" / name
        program.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return tmp_path


def run(command: list[str], folder: Path) -> str:
    """The standard output of a command that must succeed."""
    return scripts.command(command, folder, PATH=f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")


def run_block(block: str, folder: Path) -> None:
    script = folder / "block.py"
    script.write_text(block)
    scripts.run(script, folder=folder)


def losses(output: str) -> dict[int, set[str]]:
    """By step, the losses that the ranks printed. Ranks that print at once may share a line."""
    found: dict[int, set[str]] = {}
    for step, loss in re.findall(r"step (\d+): loss (\d+\.\d{4})", output):
        found.setdefault(int(step), set()).add(loss)
    return found


def test_the_quickstart_is_short_and_is_the_example() -> None:
    lines = QUICKSTART.splitlines()
    start = next(i for i, line in enumerate(lines) if "import" in line)
    end = next(i for i, line in enumerate(lines) if "optimizer.step()" in line)
    assert end - start + 1 <= QUICKSTART_LINES
    assert "if rank" not in QUICKSTART
    example = (REPOSITORY / "examples/quickstart.py").read_text()
    docstring = ast.get_docstring(ast.parse(example), clean=False)
    assert example.removeprefix(f'"""{docstring}"""').strip() == QUICKSTART.strip()


def test_the_quickstart_trains_alike_in_one_process_and_in_two(folder: Path) -> None:
    """By torchrun itself in test_launching.py, and in continuous integration."""
    script = REPOSITORY / "examples/quickstart.py"
    alone, both = (losses(scripts.run(script, processes=count, folder=folder)) for count in (0, 2))
    assert len(alone) == 10
    assert all(len(at_step) == 1 for at_step in both.values()), "the loss differs between ranks"
    assert alone == both
    assert float(alone[9].pop()) < float(alone[0].pop())


@pytest.mark.parametrize("block", EXAMPLES)
def test_examples_run(block: str, folder: Path) -> None:
    run_block(block, folder)


def test_planning_does_not_import_torch(folder: Path) -> None:
    code = "\n".join(blocks(PAGES["planning"], "python"))
    run(["python", "-c", f"{code}\nimport sys\nassert 'torch' not in sys.modules"], folder)


def test_the_printed_grid_is_what_is_printed(folder: Path) -> None:
    assert run(["python", "-c", blocks(PAGES["planning"], "python")[0]], folder) == blocks(PAGES["planning"], "text")[0]


def test_shell_commands_run_in_their_order(folder: Path) -> None:
    pytest.importorskip("matplotlib", reason="some of the commands draw")
    assert any(line.startswith("fastpipe ") for line in SHELL)
    for line in dict.fromkeys(line.partition("#")[0].strip() for line in SHELL):  # what is there twice, once
        program = line.split()[0]
        if program == "torchrun" or line.startswith("python examples/"):
            continue  # the test above runs the quickstart both ways
        words = shlex.split(line)
        if program == "fastpipe" and ">" not in words:
            scripts.run(REPOSITORY / "fastpipe/__main__.py", *words[1:], folder=folder)
        elif program not in NOT_RUN:
            assert program in PROGRAMS, f"nobody runs `{line}`"
            run(["sh", "-c", line], folder)


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (REPOSITORY / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z]+)", "\n".join(SHELL))) <= targets
    assert {"demo", "test"} <= targets
