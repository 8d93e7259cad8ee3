"""Scripts as people run them, alone or as under torchrun, without the seconds that each process takes to import torch.

The processes are forked from a server that has done so. test_launching.py and test_restart_memory.py have scripts in
processes of their very own, under torchrun itself.
"""

import atexit
import functools
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.patience import PATIENCE
from tests.process_state import shared

# With its first store a process opens a pipe for signals, which it keeps: no test is to be the first.
dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

REPOSITORY = Path(__file__).resolve().parents[1]
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tests.preload"])


@functools.cache
def start_server() -> None:
    """Have the server run, once; it stays."""
    with shared():
        forkserver.ensure_running()


def command(words: list[str], folder: Path, **environment: str) -> str:
    """What a command prints, which must succeed, in a process of its very own that knows of no others."""
    environment = _without_ranks() | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def _without_ranks() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}


@dataclass(frozen=True)
class Ran:
    """What became of a script: the exit status of every process, and what they printed."""

    statuses: list[int | None]
    out: str
    err: str


def run(script: Path, *arguments: str, processes: int = 0, folder: Path | None = None) -> str:
    """What a script prints, which must succeed.

    Args:
        script: its file.
        arguments: of the script.
        processes: how many, as torchrun would start them; 0 for one that knows of no others.
        folder: to run it in; else that of the tests.
    """
    ran = attempt(script, *arguments, processes=processes, folder=folder)
    assert not any(ran.statuses), f"{script}: {ran.statuses}\n{ran.out[-2000:]}\n{ran.err[-4000:]}"
    return ran.out


def attempt(script: Path, *arguments: str, processes: int = 0, folder: Path | None = None) -> Ran:
    """The same for one that may fail. When a process has, the others are ended, as by torchrun."""
    start_server()
    with tempfile.TemporaryDirectory(prefix="fastpipe-script-") as logs:
        # those of torchrun, too, keep the store outside
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if processes else None
        ranks = _environments(store, processes) if store else [{}]
        started: list[Any] = []
        for rank in ranks:
            environment = _without_ranks() | {"OMP_NUM_THREADS": "1"} | rank
            given = (str(script), list(arguments), str(folder or Path.cwd()), environment, logs)
            started.append(SERVER.Process(target=_run, args=given, daemon=True))
            started[-1].start()
        _wait_for(started)
        texts = [Path(logs, name).read_text(errors="replace") for name in ("out", "err")]
        return Ran([process.exitcode for process in started], *texts)


def _environments(store: dist.TCPStore, processes: int) -> list[dict[str, str]]:
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    common |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


def _wait_for(started: list[Any]) -> None:
    waiting = {process.sentinel: process for process in started}
    while waiting:
        ended = wait(list(waiting), PATIENCE)
        failed = [process for sentinel in ended if (process := waiting.pop(sentinel)).exitcode != 0]
        if failed or not ended:
            for process in waiting.values():
                process.kill()
    for process in started:
        process.join()


def print_into(out: str | Path, err: str | Path) -> None:
    """Have this process, its C++ too, print into files, behind what is in them."""
    for number, name in ((1, out), (2, err)):
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))


def _run(script: str, arguments: list[str], folder: str, environment: dict[str, str], logs: str) -> None:
    print_into(Path(logs, "out"), Path(logs, "err"))
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    torch.set_num_threads(1)
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        # as an interpreter does before it ends; one that is forked does not
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
