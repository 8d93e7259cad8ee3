"""What the benchmarks for GPUs are made of, where there is none."""

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

import fastpipe
from tests.runtime.test_benchmarks import FOLDER, imported


@pytest.fixture
def overlap(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(f"{FOLDER}/gpu")
    yield from imported("overlap")


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["interleaved_1f1b", "interleaved_zb", "dualpipev"])
def test_all_contenders_run_on_one_rank(overlap: ModuleType, alone: None, name: str) -> None:
    more = {} if name == "dualpipev" else {"stages_per_rank": 2}
    schedule = fastpipe.make_schedule(name, num_ranks=1, num_microbatches=4, **more)
    steps = overlap.contenders(schedule, overlap.make_work("cpu", (64, 1, 4), 1, 4))
    for step in steps.values():
        step()
    losses = [torch.stack(step()).mean() for title, step in steps.items() if title == "torch"]
    ours = [step().loss for title, step in steps.items() if title == "overlapped"]
    torch.testing.assert_close(losses, ours)


def test_time_in_several_streams(overlap: ModuleType) -> None:
    # streams 1 and 2 overlap from 5 to 12, one kernel of stream 1 following another; stream 3 is alone
    assert overlap.shared([(1, 0, 10), (2, 5, 15), (1, 10, 12), (3, 20, 30)]) == (25, 7)
    assert overlap.shared([(1, 0, 10), (1, 5, 15)]) == (15, 0)
    assert overlap.shared([]) == (0, 0)
