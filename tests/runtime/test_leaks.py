"""Nothing is left behind: by hundreds of steps, by one step, by a pipeline that is dropped."""

import contextlib
import gc
import os
import threading
import weakref
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

from fastpipe import Pipeline, StepError
from fastpipe.runtime.common import Failure, FailureError
from fastpipe.runtime.transport import Loopback
from fastpipe.testing import Fault
from tests.patience import PATIENCE
from tests.runtime.models import CASES, WIDTH, Block, squared

X, Y = torch.randn(9, WIDTH), torch.randn(9, WIDTH)


def pipeline(layers: list[nn.Module], schedule: str = "dualpipev", **options: Any) -> Pipeline:
    return Pipeline(layers, schedule, 4, squared, num_ranks=2, **options)


def resident_kilobytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def tensors_alive() -> int:
    gc.collect()
    return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())


def test_hundreds_of_steps(executor: str) -> None:
    torch.manual_seed(0)
    width = 64
    pipe = pipeline([Block(width) for _ in range(4)], executor=executor, merge=False)
    x, y = torch.randn(64, width), torch.randn(64, width)

    def steps(number: int) -> None:
        for _ in range(number):
            pipe.step(x, target=y)

    # the pipelines of other tests that nobody holds any more end their threads meanwhile, and not while it is counted
    gc.collect()
    steps(50)
    before = tensors_alive(), threading.active_count(), len(os.listdir("/proc/self/fd")), resident_kilobytes()
    steps(250)
    after = tensors_alive(), threading.active_count(), len(os.listdir("/proc/self/fd")), resident_kilobytes()
    # fewer is no leak: what an earlier test left may end meanwhile
    assert all(now <= then for now, then in zip(after[:3], before[:3], strict=True)), (before, after)
    # one microbatch's activations kept at every step would be over 12 MB
    assert after[3] - before[3] < 8_000


class Watched(nn.Module):
    """Remembers its activations weakly."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.seen: list[weakref.ref[torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.block(x)
        self.seen += [weakref.ref(x), weakref.ref(y)]
        return 1 * y


@pytest.mark.parametrize("how", ["step", "eval_step", "failed step"])
def test_activations_die_with_their_step(how: str, executor: str) -> None:
    watched = [Watched() for _ in range(4)]
    layers: list[nn.Module] = [*watched]
    if how == "failed step":
        layers[2] = Fault(watched[2], 2, RuntimeError("on purpose"))
    pipe = pipeline(layers, executor=executor, merge=False)
    try:
        (pipe.eval_step if how == "eval_step" else pipe.step)(X, target=Y)
    except RuntimeError as error:
        # a traceback holds the frames, and they the activations, as for any exception
        error.with_traceback(None).__context__ = None
        del error
    assert [len(module.seen) for module in watched] >= [2] * 4
    layers_alive = [ref() for module in watched for ref in module.seen if ref() is not None]
    # the first layer's inputs are views of the batch, which autograd needs no more either
    assert not layers_alive


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError("on purpose")


@pytest.mark.parametrize("schedule", ["zbv", "zb_h1"])
@pytest.mark.parametrize("where", ["loss", "backward"])
def test_a_loss_that_fails_leaves_no_graph(schedule: str, where: str, executor: str) -> None:
    """Of a microbatch whose backward was to be split, the graph and the note of its linears hold each other."""

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if where == "loss":
            raise RuntimeError("on purpose")
        return squared(FailingBackward.apply(output), target)

    watched = [Watched() for _ in range(4)]
    pipe = Pipeline(watched, schedule, 4, loss_fn, num_ranks=2, executor=executor, merge=False)
    try:
        pipe.step(X, target=Y)
    except RuntimeError as error:
        error.with_traceback(None).__context__ = None
        del error
    assert all(module.seen for module in watched)
    assert not [ref() for module in watched for ref in module.seen if ref() is not None]


class Raising(nn.Module):
    """Raises an exception that it does not hold."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("on purpose")


class Ended(BaseException):
    """Raised by a signal's handler."""


def test_what_a_handler_raises_is_in_no_cycle() -> None:
    pipe = pipeline([Block() for _ in range(4)])

    def seen() -> weakref.ref[BaseException]:
        try:
            try:
                raise FailureError(Failure(0, "ended")) from Ended()
            except FailureError as error:
                pipe._steps.abort(error.failure, error.__cause__)
        except Ended as ended:
            return weakref.ref(ended)

    gc.disable()
    try:
        assert seen()() is None
    finally:
        gc.enable()


class Unreadable:
    """A program whose collectives cannot run."""

    num_microbatches = 4

    def __getitem__(self, rank: int) -> NoReturn:
        raise self.Error

    class Error(Exception):
        """Can be referenced weakly."""


def test_what_collectives_raise_is_in_no_cycle() -> None:
    local: Any = pipeline([Block() for _ in range(4)])._steps.ranks
    gc.disable()
    try:
        outcome = local.run_collectives(Unreadable())
        seen = weakref.ref(outcome.error)
        assert isinstance(outcome.error, Unreadable.Error)
        del outcome
        assert seen() is None
    finally:
        gc.enable()


class Refusing(Loopback):
    """Lacks what a program needs."""

    def endpoint(self, *_: Any) -> NoReturn:
        raise ValueError("no descriptor is left")

    native = endpoint


@pytest.mark.parametrize("how", ["step", "failed step", "refused step", "refused program"])
def test_a_dropped_pipeline_goes_at_once(how: str, executor: str) -> None:
    """Python collects cycles when it likes, which may be never: nothing large may wait for that."""
    layers = CASES["plain"].layers(4)
    if how == "failed step":
        layers[2] = Raising()
    pipe = pipeline(layers, executor=executor, transport=Refusing() if how == "refused program" else "auto")
    held = [weakref.ref(pipe), weakref.ref(pipe.transport), *map(weakref.ref, layers)]
    gc.collect()
    gc.disable()
    try:
        with contextlib.nullcontext() if how == "step" else pytest.raises((RuntimeError, ValueError)) as raised:
            pipe.step(X, target=None if how == "refused step" else Y)
        del pipe, layers, raised
        assert not [ref() for ref in held if ref() is not None]
    finally:
        gc.enable()


class Keeping(nn.Module):
    """Keeps the exception that it raised; its traceback has the frames of the step, and they the pipeline."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            raise RuntimeError("on purpose")
        except RuntimeError as error:
            self.error = error
            raise


def leaves_nothing_of_a_kept_exception(executor: str, num_ranks: int | None, keeping: int) -> bool:
    """Whether a pipeline of two ranks goes, with its threads, though a layer of it keeps what the step raised."""
    before = set(threading.enumerate())
    layers: list[nn.Module] = [Block() for _ in range(4)]
    layers[keeping] = Keeping()
    pipe = Pipeline(layers, "1f1b", 4, squared, num_ranks=num_ranks, executor=executor)
    with contextlib.suppress(RuntimeError, StepError):
        pipe.step(X, target=Y)
    assert hasattr(layers[keeping], "error") or keeping // 2 != pipe.rank
    held = [weakref.ref(pipe), weakref.ref(pipe.transport), *map(weakref.ref, layers)]
    started = set(threading.enumerate()) - before
    del pipe, layers
    gc.collect()
    for thread in started:
        thread.join(PATIENCE)
    return not [ref() for ref in held if ref() is not None] and not any(thread.is_alive() for thread in started)


def test_a_layer_that_keeps_its_exception_keeps_no_pipeline(executor: str) -> None:
    assert leaves_nothing_of_a_kept_exception(executor, 2, 1)


@pytest.mark.parametrize(("argument", "value"), [("partition", [1]), ("timeout", -1.0)])
def test_a_pipeline_that_was_refused_leaves_nothing(argument: str, value: Any) -> None:
    before, layers = set(threading.enumerate()), CASES["plain"].layers(4)
    held = [*map(weakref.ref, layers)]
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(ValueError, match=argument) as raised:
            pipeline(layers, **{argument: value})
        del layers, raised
        assert not [ref() for ref in held if ref() is not None]
    finally:
        gc.enable()
    assert set(threading.enumerate()) <= before
