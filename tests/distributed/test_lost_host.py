"""A host that vanishes without a word: the others say so within seconds, and nobody waits on for its messages."""

import contextlib
import ctypes
import json
import os
import signal
import socket
import struct
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fastpipe import Pipeline
from tests.conftest import BOTH, executors_in_turn, skip_without_native
from tests.distributed.hosts import on_hosts
from tests.distributed.ranks import ranks
from tests.distributed.test_death import COUNT, SIZE, check, others, report
from tests.patience import PATIENCE
from tests.runtime.checks import rows_for
from tests.runtime.faults import AtCall
from tests.runtime.models import CASES

Place = tuple[str, int]
"""Seconds. A host is taken to be gone after 1.5 of silence, and where it held the store that is another moment."""


@pytest.fixture(autouse=True)
def waits_can_be_ended() -> None:
    """Without the extension only the timeout ends a wait for a message."""
    skip_without_native()


def cut_off(places: set[Place] | None = None) -> set[Place]:
    """The kernel drops whatever comes on this process's connections, or on those to some places, from now on.

    Returns:
        Their own places.
    """
    nothing = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF: accept 0 bytes
    program = struct.pack("HP", 1, ctypes.addressof(nothing))
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            inet = connection.family in (socket.AF_INET, socket.AF_INET6)
            if inet and (places is None or _place(connection.getpeername()) in places):
                connection.setsockopt(socket.SOL_SOCKET, 26, program)  # SO_ATTACH_FILTER
                found.add(_place(connection.getsockname()))
    return found


def _place(address: tuple[Any, ...]) -> Place:
    return str(address[0]).removeprefix("::ffff:"), int(address[1])


def vanish(note: Path) -> None:
    """This process's host vanishes: nothing comes here, and nothing is said any more."""
    draft = note.with_suffix(".draft")
    draft.write_text(json.dumps({"places": sorted(cut_off()), "time": time.monotonic()}))
    draft.rename(note)
    os.kill(os.getpid(), signal.SIGSTOP)


def lose(note: Path) -> None:
    """What the victim's kernel still says by itself does not arrive here."""
    while not note.exists():
        time.sleep(0.01)
    cut_off({(host, port) for host, port in json.loads(note.read_text())["places"]})


def train(victim: int, note: Path, executor: str, hosts: str) -> dict[str, Any]:
    case = CASES["plain"]
    mine = dist.get_rank() == victim
    stages = [AtCall(lambda: vanish(note), COUNT + 3 if mine else -1) for _ in range(SIZE)]
    with on_hosts(hosts):
        pipe = Pipeline(stages, "1f1b", COUNT, case.loss_fn, executor=executor, timeout=PATIENCE)
    assert pipe.transport.kind in ("mixed", "process_group")
    if not mine:
        threading.Thread(target=lose, args=(note,), daemon=True).start()
    try:
        for batch in case.batches(3, rows_for(COUNT)):
            pipe.step(*batch.args, target=batch.target)
    except Exception as error:
        return report(pipe, error, time.monotonic() - json.loads(note.read_text())["time"])
    raise AssertionError("nothing was raised")


@executors_in_turn("victim, hosts", [(3, "aaab"), (1, "abcd"), (0, "abbb")])
def test_nobody_waits_for_a_host_that_has_vanished(victim: int, hosts: str, executor: str, tmp_path: Path) -> None:
    with ranks(SIZE) as group:
        group.start(train, victim, tmp_path / "note", executor, hosts)
        check(group.results(others(victim)), victim)


@BOTH
def test_nor_for_one_that_held_the_store(executor: str, tmp_path: Path) -> None:
    with ranks(SIZE, host="first") as group:
        group.start(train, 0, tmp_path / "note", executor, "abcd")
        check(group.results(others(0)), 0)
