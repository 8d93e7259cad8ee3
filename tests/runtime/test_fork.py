"""Forked children of a process with a pipeline: they neither hang nor crash, and the pipeline goes on."""

import gc

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from fastpipe import Pipeline  # noqa: E402
from tests.conftest import overlap_of  # noqa: E402
from tests.forks import in_child  # noqa: E402

COUNT = 8


def trained(executor: str) -> Pipeline:
    """A pipeline whose ranks are threads, natively each with a helper thread that has run backwards of pairs."""
    layers = [nn.Linear(4, 4) for _ in range(4)]
    options = {"num_ranks": 2, "overlap": overlap_of(executor), "executor": executor}
    pipe = Pipeline(layers, "dualpipev", COUNT, nn.functional.mse_loss, **options)
    for _ in range(3):  # in the first one pairs run in order, since it looks for random numbers
        step(pipe)
    assert (pipe._steps.ranks.pair_counts()["together"] > 0) == (executor == "native")
    return pipe


def step(pipe: Pipeline) -> None:
    x = torch.randn(2 * COUNT, 4)
    pipe.step(x, target=x)


def test_a_child_may_let_go_of_a_pipeline(executor: str) -> None:
    """What it destroys waits for no thread of its parent's."""
    held = [trained(executor)]

    def drop() -> None:
        held.clear()
        gc.collect()

    assert in_child(drop) == 0
    step(held[0])


def test_a_child_runs_no_step(executor: str) -> None:
    pipe = trained(executor)

    def run() -> None:
        with pytest.raises(RuntimeError, match=r"process \d+, .*process \d+ .*fork"):
            step(pipe)
        with pytest.raises(RuntimeError, match="run steps in the process that built it"):
            pipe.clip_grad_norm_(1.0)

    assert in_child(run) == 0
    step(pipe)


def test_workers_of_a_data_loader_may_be_forked(executor: str) -> None:
    pipe = trained(executor)
    x = torch.randn(4 * COUNT, 4)
    loader = DataLoader(TensorDataset(x, x), batch_size=COUNT, num_workers=2, multiprocessing_context="fork")
    for _ in range(2):
        for batch, target in loader:
            pipe.step(batch, target=target)
