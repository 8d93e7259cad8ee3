"""Groups of a device end when all ranks have come to it: what one has sent another may still wait for."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import torch.distributed as dist

from fastpipe.runtime.transport.groups import wait_for_all
from tests.patience import PATIENCE

SOON = 0.3


def test_who_closes_first_waits_for_the_others(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 2)
    first = threading.Thread(target=wait_for_all, args=(store, 0, 2, PATIENCE))
    first.start()
    first.join(SOON)
    assert first.is_alive(), "rank 1 has not come"
    wait_for_all(store, 1, 2, PATIENCE)
    first.join(PATIENCE)
    assert not first.is_alive()


def test_who_does_not_come_is_not_waited_for_long(tmp_path: Path) -> None:
    start = time.monotonic()
    wait_for_all(dist.FileStore(str(tmp_path / "store"), 2), 0, 2, SOON)
    assert SOON <= time.monotonic() - start < PATIENCE
