"""A recording on CUDA that fails, with what torch has for CUDA replaced: there may be no GPU here."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from fastpipe.runtime.executor.cuda_graph import record

POOL = (0, 7)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """What the allocator is told, and the recordings that ended well."""
    found: list[tuple] = []

    @contextlib.contextmanager
    def graph(graph: object, *, pool: object, stream: object, capture_error_mode: str) -> Iterator[None]:
        assert pool == POOL and capture_error_mode == "thread_local"
        yield
        found.append(("ended",))

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=None))
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: POOL)
    monkeypatch.setattr(torch, "zeros", lambda *args, **options: None)
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, lambda *args, name=name: found.append((name, *args)), raising=False)
    return found


STREAM = SimpleNamespace(device=torch.device("cuda", 3))


def test_one_that_works_keeps_its_memory(called: list[tuple]) -> None:
    record(STREAM, lambda: None)
    assert called == [("ended",)]


def test_one_that_fails_gives_its_memory_back_and_is_followed_by_one_that_ends_well(called: list[tuple]) -> None:
    with pytest.raises(RuntimeError, match="on purpose"):
        record(STREAM, fail)
    assert called == [("_cuda_endAllocateToPool", 3, POOL), ("_cuda_releasePool", 3, POOL), ("ended",)]


def test_where_torch_has_given_it_back_it_is_not_given_back_again(
    called: list[tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", fail, raising=False)
    with pytest.raises(RuntimeError, match="on purpose"):
        record(STREAM, fail)
    assert called == [("ended",)]


def fail(*_: object) -> None:
    raise RuntimeError("on purpose")
