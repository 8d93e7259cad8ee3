"""A layer that stands in several stages of one process is one layer, whatever is changed in it later."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fastpipe import Pipeline
from fastpipe.runtime.model.chain import Chain
from fastpipe.testing import reference_step
from tests.conftest import executors_in_turn
from tests.runtime.checks import same_bits, unequal

WIDTH = 6


class Repeated(nn.Module):
    """Attributes, buffers, parts, and ways to get at its own parts that are not parts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act, self.drop = nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.5)
        self.listed = [self.linear]
        self.again: Callable[..., torch.Tensor] = self.apply_linear
        self.partly = functools.partial(self.apply_linear, scale=0.5)
        self.factor, self.options = 1.0, {"shift": 0.0}
        self.register_buffer("calls", torch.zeros(()))

    def apply_linear(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.linear(x) * scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        # a dropout that takes no random numbers
        x = x * (2.0 if self.training else 1.0) * self.factor + self.options["shift"]
        return self.act(self.listed[0](x)) + self.again(x) + self.partly(x)


def build(schedule: str = "1f1b", count: int = 4, executor: str = "auto") -> tuple[Repeated, list[nn.Module], Pipeline]:
    torch.manual_seed(3)
    layer = Repeated()
    layers = [layer, nn.Linear(WIDTH, WIDTH), layer, nn.Linear(WIDTH, WIDTH)]
    return layer, layers, Pipeline(layers, schedule, count, nn.functional.mse_loss, num_ranks=2, executor=executor)


def compare(pipe: Pipeline, layers: list[nn.Module]) -> None:
    unsplit = Chain(dict(enumerate(copy.deepcopy(layers))))
    for model in (pipe, unsplit):
        for parameter in model.parameters():
            parameter.grad = None
    x, y = torch.randn(2, 8, WIDTH)
    result = pipe.step(x, target=y)
    reference = reference_step(unsplit, (x, y), pipe.schedule, nn.functional.mse_loss, ties=pipe._local.ties)
    assert result.loss is not None and same_bits(result.loss, reference.loss)
    assert not unequal(pipe, unsplit)


def replace_weight(layer: Repeated) -> None:
    layer.linear.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))


def replace_act(layer: Repeated) -> None:
    layer.act = nn.Sigmoid()


def add_and_remove_attributes(layer: Repeated) -> None:
    layer.forward = functools.partial(Repeated.forward, layer)  # type: ignore[method-assign]
    compared = layer.linear
    del layer.listed
    layer.listed = (compared,)  # type: ignore[assignment]


CHANGES: dict[str, Callable[[Repeated], Any]] = {
    "attribute": lambda layer: setattr(layer, "factor", 3.0),
    "in an attribute": lambda layer: layer.options.update(shift=0.5),
    "eval": lambda layer: layer.eval(),
    "part": replace_act,
    "part's attribute": lambda layer: setattr(layer.act, "forward", torch.sigmoid),
    "hook": lambda layer: layer.register_forward_hook(lambda module, args, output: output * 2),
    "hook before": lambda layer: layer.linear.register_forward_pre_hook(lambda module, args: (args[0] + 1,)),
    "backward hook": lambda layer: layer.linear.register_full_backward_pre_hook(lambda module, grads: (grads[0] * 2,)),
    "method": lambda layer: setattr(layer, "again", lambda x: x),
    "weight": replace_weight,
    "attributes": add_and_remove_attributes,
    "none": lambda layer: None,
}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@executors_in_turn("change", CHANGES)
def test_what_is_changed_later_is_changed_in_all_stages(change: str, executor: str) -> None:
    layer, layers, pipe = build(executor=executor)
    compare(pipe, layers)
    undo = CHANGES[change](layer)
    compare(pipe, layers)
    compare(pipe, layers)
    if "hook" in change:
        undo.remove()
        compare(pipe, layers)


def test_each_stage_has_its_own_alias() -> None:
    """What leads to a part, by a list or a bound method, leads to the twin's."""
    layer, _, pipe = build("1f1b", 2)
    twin = pipe.stage_modules[1].get_submodule("2")
    assert isinstance(twin, Repeated) and twin is not layer
    assert twin.linear is not layer.linear and twin.listed == [twin.linear]
    assert twin.again.__self__ is twin.partly.func.__self__ is twin  # type: ignore[attr-defined]
    assert twin.options is layer.options and twin.act is layer.act and twin._buffers is layer._buffers
    assert twin.linear.weight is layer.linear.weight
    copied = copy.deepcopy(twin)
    assert copied.linear.weight is not layer.linear.weight and copied.listed == [copied.linear]


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "interleaved_1f1b"])
def test_a_buffer_that_the_forward_replaces(schedule: str, executor: str) -> None:
    """In one process two ranks may do it at once, and one of them get lost; but none by the next step."""
    count = 1 if schedule == "1f1b" else 2
    layer, layers, pipe = build(schedule, count, executor)
    for _ in range(5):
        compare(pipe, layers)
    # one microbatch is in one stage at a time
    assert float(layer.calls) == 10 if count == 1 else 5 <= float(layer.calls) <= 20
    state = pipe.state_dict()
    assert same_bits(state["0.calls"], layer.calls) and same_bits(state["2.calls"], layer.calls)


def test_the_references_buffers_are_the_layers() -> None:
    _, layers, pipe = build()
    unsplit = Chain(dict(enumerate(copy.deepcopy(layers))))
    x, y = torch.randn(2, 8, WIDTH)
    reference_step(unsplit, (x, y), pipe.schedule, nn.functional.mse_loss, ties=pipe._local.ties)
    assert float(unsplit.get_submodule("0").calls) == 8  # type: ignore[arg-type]


def test_copies_of_both_routes_have_twins_of_their_own(executor: str) -> None:
    layer, layers, pipe = build("dualpipe", 4, executor)
    compare(pipe, layers)
    layer.eval()
    compare(pipe, layers)
    replace_weight(layer)
    compare(pipe, layers)
