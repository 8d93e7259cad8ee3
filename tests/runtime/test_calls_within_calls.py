"""Calls that cannot be under way at once are refused, and do no harm to the one that is."""

import copy
import pickle
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

import fastpipe
from fastpipe.testing import reference_step
from tests.runtime.checks import same_bits
from tests.runtime.models import WIDTH, Block, squared


def pipeline(layers: list[nn.Module], executor: str, **options: object) -> fastpipe.Pipeline:
    given = {"loss_fn": squared, "num_ranks": 2, "timeout": 30, **options}
    return fastpipe.Pipeline(layers, "1f1b", 2, executor=executor, **given)  # type: ignore[arg-type]


class Calls(nn.Module):
    """Calls something in its first forward, and keeps what was raised there, in words."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.call: Callable[[], object] | None = None
        self.error = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        call, self.call = self.call, None
        if call is not None:
            try:
                call()
            except Exception as error:
                self.error = repr(error)
        out: torch.Tensor = self.block(x)
        return out


def in_thread(call: Callable[[], object]) -> Callable[[], None]:
    """The call in another thread, whose exception is raised here."""

    def run() -> None:
        raised: list[Exception] = []

        def catch() -> None:
            try:
                call()
            except Exception as error:
                raised.append(error)

        thread = threading.Thread(target=catch)
        thread.start()
        thread.join()
        if raised:
            raise raised[0]

    return run


@pytest.mark.parametrize("where", ["the same thread", "another thread"])
@pytest.mark.parametrize("call", ["step", "clip"])
def test_a_call_within_a_step_is_refused_and_the_step_goes_on(where: str, call: str, executor: str) -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = [Calls(), Block()]
    unsplit = copy.deepcopy(layers)
    pipe = pipeline(layers, executor)
    x, y = torch.randn(2, 4, WIDTH)

    def again() -> object:
        return pipe.step(x, target=y) if call == "step" else pipe.clip_grad_norm_(1.0)

    layers[0].call = again if where == "the same thread" else in_thread(again)  # type: ignore[assignment]
    result = pipe.step(x, target=y)
    assert layers[0].error.startswith("RuntimeError") and "in the middle of another call" in layers[0].error
    assert same_bits(result.loss, reference_step(unsplit, (x, y), pipe.schedule, squared).loss)
    assert same_bits(pipe.step(x, target=y).loss, result.loss)


def test_a_step_that_would_wait_for_its_own_caller_is_refused(executor: str) -> None:
    inner = pipeline([Block(), Block()], executor, loss_fn=None).eval()
    layers: list[nn.Module] = [Calls(), Block()]
    pipe = pipeline(layers, executor)
    x, y = torch.randn(2, 4, WIDTH)
    layers[0].call = lambda: inner.eval_step(x)  # type: ignore[assignment]
    pipe.step(x, target=y)
    assert layers[0].error.startswith("RuntimeError") and "give the inner pipeline num_ranks=1" in layers[0].error
    assert inner.eval_step(x).outputs.shape == x.shape  # and is none the worse for it


def test_a_pipeline_of_one_rank_may_be_called_in_a_layer(executor: str) -> None:
    inner = pipeline([Block(), Block()], executor, num_ranks=1, loss_fn=None).eval()
    layers: list[nn.Module] = [Calls(), Block()]
    x, y = torch.randn(2, 4, WIDTH)
    layers[0].call = lambda: inner.eval_step(x)  # type: ignore[assignment]
    pipeline(layers, executor).step(x, target=y)
    assert layers[0].call is None and layers[0].error == ""


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_pipeline_is_not_copied_but_its_layers_are(way: Callable[[object], object]) -> None:
    layers: list[nn.Module] = [Block(), Block()]
    pipe = pipeline(layers, "auto")
    pipe.step(*torch.randn(1, 4, WIDTH), target=torch.randn(4, WIDTH))
    with pytest.raises(TypeError, match="cannot be copied or pickled.*state_dict"):
        way(pipe)
    way(layers)
