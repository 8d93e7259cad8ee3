"""What crosses a boundary between stages: every tree as it was; what cannot cross is refused by name."""

import enum
import itertools
import json
import math
import pickle
import threading
from collections import OrderedDict, defaultdict, deque, namedtuple
from typing import Any

import pytest
import torch
from torch import nn
from torch.masked import masked_tensor
from torch.utils import _pytree as pytree

import fastpipe
from fastpipe import Pipeline
from fastpipe.runtime.model.chain import names_later
from fastpipe.runtime.stage.boundary import from_tensors, to_tensors, treespec_tensor
from fastpipe.runtime.stage.losses import names_of
from fastpipe.runtime.stage.stage import Chain
from tests.conftest import executors_in_turn
from tests.runtime.checks import assert_same, reference_of, same_bits
from tests.runtime.models import CASES, WIDTH, Block, Case, squared
from tests.runtime.tree_models import Attends, Down, Pair, Rotary, State, Up, WithLinear


class Colour(enum.Enum):
    RED = "red"


def crossed(value: Any, **carried: Any) -> tuple[Any, dict[str, Any]]:
    return from_tensors(to_tensors(value, carried, 1))


def assert_alike(found: Any, expected: Any) -> None:
    leaves, structure = pytree.tree_flatten(found)
    wanted, shape = pytree.tree_flatten(expected)
    assert structure == shape
    for leaf, other in zip(leaves, wanted, strict=True):
        if isinstance(other, torch.Tensor):
            assert leaf is other
        else:
            assert type(leaf) is type(other) and repr(leaf) == repr(other)


TENSORS = (torch.ones(2), torch.arange(3), torch.ones(2, dtype=torch.bool))


@pytest.mark.parametrize("value", [TENSORS[0], TENSORS, list(TENSORS), ()], ids=["one", "tuple", "list", "none"])
def test_tensors_cross_as_they_are(value: Any) -> None:
    given = (value,) if isinstance(value, torch.Tensor) else tuple(value)
    assert to_tensors(value, {}, 0) == given
    assert from_tensors(given) == (given, {})


@pytest.mark.parametrize(
    "value",
    [
        None,
        (TENSORS[0], None),
        {"a": [TENSORS[1], {"b": (TENSORS[2], 3)}]},
        (Pair(*TENSORS[:2]), 1.5, -0.0, 0.0, math.nan, True, 1, 0, 2**80, -(2**63), "text", b"bytes", torch.float16),
        State(TENSORS[0], 7, None),
        OrderedDict(z=TENSORS[0], a=[]),
        torch.arange(5, dtype=torch.uint8),
        (torch.arange(5, dtype=torch.uint8), TENSORS[0]),
        (
            Colour.RED,
            1j,
            slice(1, None),
            range(3),
            torch.device("cuda", 1),
            torch.channels_last,
            torch.Size([2, 3]),
            int,
        ),
        defaultdict(list, a=deque([TENSORS[0], {1, "two"}], 5)),
        torch.return_types.topk((TENSORS[0], TENSORS[1])),
        [[TENSORS[0]]],
        ((TENSORS[0], TENSORS[1]),),
    ],
)
def test_a_tree_crosses(value: Any) -> None:
    for _ in range(2):  # the second time from what is known
        args, carried = crossed(value, memory=TENSORS[1], nothing=None)
        assert_alike(args, tuple(value) if type(value) in (tuple, list) else (value,))
        assert_alike(carried, {"memory": TENSORS[1], "nothing": None})
        args, carried = crossed(value)
        assert_alike(args, tuple(value) if type(value) in (tuple, list) else (value,))
        assert carried == {}


def test_a_tensor_crosses_once() -> None:
    x, y = TENSORS[0], TENSORS[1]
    assert to_tensors((x, y, x), {"memory": [y, 3, x]}, 0)[1:] == (x, y)
    args, carried = crossed((x, y, x), memory=[y, 3, x])
    assert args[0] is args[2] is carried["memory"][2] is x
    assert args[1] is carried["memory"][0] is y and carried["memory"][1] == 3
    (one, other), _ = crossed((x, x))
    assert one is other is x


def test_values_that_stages_change_are_their_own() -> None:
    sent = to_tensors((TENSORS[0], {1, 2}), {}, 0)
    from_tensors(sent)[0][1].add(3)
    assert from_tensors(sent)[0][1] == {1, 2}


def test_numbers_do_not_change_the_length() -> None:
    lengths = {len(to_tensors((TENSORS[0], n, float(n)), {}, 0)[0]) for n in (0, 1, 255, 256, 70000, 2**40, -(2**62))}
    assert len(lengths) == 1


class Opaque:
    """Has a tensor in it, and no pytree knows."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Number(float):
    """As NumPy's are."""


class Scaled(torch.Tensor):
    """A tensor that would be another one after the boundary."""


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Opaque(TENSORS[0]), "stage 3 returned a Opaque that cannot be sent .*a Opaque cannot be encoded.*register"),
        (nn.Linear(1, 1), "stage 3 returned a Linear"),
        (Number(), "stage 3 returned a Number that cannot be sent"),
        (threading.Lock(), "stage 3 returned a lock"),
        (lambda: 1, "stage 3 returned a function"),
        (TENSORS[0].as_subclass(Scaled), "stage 3 returned a Scaled, a subclass of Tensor .*as_subclass"),
        (masked_tensor(torch.ones(2), torch.tensor([True, False])), "stage 3 returned a MaskedTensor, a subclass"),
    ],
)
def test_what_cannot_cross_is_named(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        to_tensors((TENSORS[0], value), {}, 3)
    if isinstance(value, torch.Tensor):
        with pytest.raises(ValueError, match=message):
            to_tensors(value, {}, 3)


def test_a_named_tuple_that_the_other_end_cannot_find_is_refused() -> None:
    made = namedtuple("made", "x")  # the module has no such attribute
    with pytest.raises(ValueError, match="tests.runtime.test_boundary.made"):
        to_tensors(made(TENSORS[0]), {}, 3)


RAN: list[int] = []


class Runs:
    """What pickle would call."""

    def __reduce__(self) -> Any:
        return RAN.append, (1,)


@pytest.mark.parametrize(
    "text",
    [
        pickle.dumps(Runs()),
        json.dumps([[["class", ["subprocess", "Popen"]], None, []], "", []]).encode() + b"\n[]",
        json.dumps([[["class", ["builtins", "eval"]], None, []], "", []]).encode() + b"\n[]",
        b'[null,"v",[]]\n[["class",["os","system"]]]',
        b'[null,"v",[]]\n[["torch.dtype","load"]]',
        b'[null,"v",[]]\n[["enum",[["builtins","list"],"append"]]]',
    ],
)
def test_what_arrives_runs_nothing(text: bytes) -> None:
    """Connections are not authenticated."""
    with pytest.raises(ValueError):
        from_tensors((treespec_tensor(text),))
    assert not RAN


def test_names_that_later_stages_take() -> None:
    first: dict[str, list[str] | None] = {"0": ["x"], "3": ["mask"]}
    second: dict[str, list[str] | None] = {"1": ["scale", "x"], "2": []}
    assert names_later([first, second], 0) == {"scale", "x", "mask"}
    assert names_later([first, second], 1) == {"mask"}
    assert names_later([first, second], 3) == frozenset()
    assert names_later([first, {"2": None}], 1) is None


class Nosy(Block):
    """Counts what comes to it."""

    def forward(self, x: torch.Tensor, **others: Any) -> torch.Tensor:
        self.seen = sorted(others)
        return super().forward(x)


def pipeline(layers: list[nn.Module], executor: str = "auto", **options: Any) -> Pipeline:
    options = {"schedule": "1f1b", "num_microbatches": 4, "loss_fn": squared, "num_ranks": len(layers), **options}
    return Pipeline(layers, executor=executor, **options)


def batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(8, WIDTH), "target": torch.randn(8, WIDTH)}


def test_a_value_travels_no_farther_than_it_is_named(executor: str) -> None:
    layers = [Rotary(), Attends(), Block(), Block()]
    pipe = pipeline(layers, executor)
    sent: dict[int, set[int]] = {}
    for stage in pipe._steps.stages:
        run = stage.run

        def watched(microbatch: int, inputs: Any, run: Any = run, index: int = stage.index) -> Any:
            sent.setdefault(index, set()).add(len(inputs))
            return run(microbatch, inputs)

        stage.run = watched  # type: ignore[method-assign]
    data = batch()
    pipe.step(data["x"], target=data["target"])
    # a plan, the output, which is the memory, too, a mask, a tuple of two; after the last that names them the output
    assert sent == {0: {0}, 1: {5}, 2: {1}, 3: {1}}


def masked_loss(output: torch.Tensor, target: torch.Tensor, mask: torch.Tensor, *, weight: torch.Tensor) -> Any:
    return squared(output * mask, target) + weight.square().mean()


def test_which_names_a_loss_takes() -> None:
    assert names_of(masked_loss) == {"mask", "weight"}
    assert names_of(nn.functional.mse_loss) == names_of(nn.MSELoss()) == names_of(None) == frozenset()
    assert names_of(lambda *args, mask, **others: None) == {"mask"}


class Weighs(nn.Module):
    """Carries a mask and a weight, which the loss alone takes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.linear(x)
        return fastpipe.carry(hidden, mask=hidden > 0, weight=self.weight.exp())


@pytest.mark.parametrize("last", [Block, Weighs])  # which carries both anew
def test_a_loss_takes_what_is_carried(executor: str, last: type[nn.Module]) -> None:
    torch.manual_seed(0)
    layers = [Weighs(), Block(), Block(), last()]
    pipe = pipeline(layers, executor, loss_fn=masked_loss)
    data = batch()
    assert fastpipe.check_parity(pipe, layers, (data["x"], data["target"])).ok
    pipe.profile_layers(data["x"], target=data["target"], num_steps=1)  # the loss gets them there, too


def test_a_layer_that_takes_anything_gets_all(executor: str) -> None:
    layers = [Rotary(), Block(), Nosy(), Block()]
    pipeline(layers, executor, loss_fn=None).eval_step(batch()["x"])
    assert layers[2].seen == ["mask", "memory", "rotary"]


def test_a_value_that_nobody_takes_is_refused(executor: str) -> None:
    data = batch()
    for layers in ([Rotary(), Block(), Block()], [Block(), Rotary()], [Block(), Down(), Rotary()]):
        with pytest.raises(ValueError, match=r"carry: stage \d .*'\w+'"):
            pipeline(layers, executor).step(data["x"], target=data["target"])


def test_a_value_given_twice_is_refused(executor: str) -> None:
    data = batch()
    with pytest.raises(ValueError, match="mask: .* step, .* stage 1"):
        pipeline([Rotary(), Attends()], executor).step(
            data["x"], target=data["target"], mask=torch.ones(8, WIDTH, dtype=torch.bool)
        )


def test_carry_needs_a_value() -> None:
    with pytest.raises(ValueError, match="there is nothing to carry"):
        fastpipe.carry(TENSORS[0])


def test_a_carried_output_may_be_carried_again() -> None:
    both = fastpipe.carry(fastpipe.carry(TENSORS[0], mask=1, weight=2), weight=3)
    assert both.output is TENSORS[0] and both.values == {"mask": 1, "weight": 3}


def test_values_carried_within_a_layer_are_refused(executor: str) -> None:
    data = batch()
    layers: list[nn.Module] = [nn.Sequential(Weighs(), nn.Linear(WIDTH, WIDTH)), Block()]
    with pytest.raises(TypeError, match=r"linear got what fastpipe.carry returned.*nn.Sequential"):
        pipeline(layers, executor).step(data["x"], target=data["target"])


@pytest.mark.parametrize("cut", [[2, 1, 1], [1, 2, 1], [1, 1, 2], [1, 1, 1, 1]], ids=str)
def test_the_cut_does_not_matter(executor: str, cut: list[int]) -> None:
    """Within a stage and between stages layers get the same arguments."""
    torch.manual_seed(0)
    layers = [Down(), Down(), Up(), Up()]
    data = batch()
    whole = pipeline(layers, executor, num_ranks=1).step(data["x"], target=data["target"])
    expected = [p.grad for layer in layers for p in layer.parameters()]
    for layer in layers:
        layer.zero_grad()
    result = pipeline(layers, executor, num_ranks=len(cut), partition=cut).step(data["x"], target=data["target"])
    assert same_bits(result.loss, whole.loss)
    assert all(map(same_bits, [p.grad for layer in layers for p in layer.parameters()], expected))


class Doubling(WithLinear):
    """Hands a tensor on in two places, and uses what it gets several times."""

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.linear(x) * x
        for other in others:
            y = y + other * other.sin()
        return y, y, x


class Joining(nn.Module):
    """The last of them."""

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        return torch.stack(given).sum(0)


HANDED_ON_TWICE = {
    "doubling": Case(lambda n: [*(Doubling() for _ in range(n - 1)), Joining()]),
    "u_net": CASES["u_net"],
    "carried": CASES["carried"],
}


@executors_in_turn("name, first", itertools.product(HANDED_ON_TWICE, range(1, 8)))
def test_a_tensor_that_is_handed_on_twice_stays_one(name: str, first: int, executor: str) -> None:
    """Wherever the model is cut; as two, the gradients of its uses would be added in another order."""
    case = HANDED_ON_TWICE[name]
    layers, unsplit = case.layers(8), Chain(dict(enumerate(case.layers(8))))
    pipe = Pipeline(layers, "gpipe", 3, squared, num_ranks=2, partition=[first, 8 - first], executor=executor)
    given, twin = case.batches(1, 7)[0], case.batches(1, 7)[0]
    result = pipe.step(*given.args, target=given.target)
    assert_same(pipe, result, unsplit, reference_of(unsplit, twin, pipe, case))


class Listing(nn.Module):
    """Returns a list, which is several arguments, within a stage as between two."""

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        return [x, x + 1] if y is None else x + y


@pytest.mark.parametrize("cut", [[2, 1], [1, 2]], ids=str)
def test_a_list_is_several_arguments_wherever_the_cut_is(cut: list[int]) -> None:
    layers = [Block(), Listing(), Listing()] if cut == [2, 1] else [Listing(), Listing(), Block()]
    assert pipeline(layers, num_ranks=2, partition=cut, loss_fn=None).eval_step(torch.randn(8, WIDTH)).outputs.shape


class TakesOne(nn.Module):
    def forward(self, pair: Any) -> Any:
        return pair


@pytest.mark.parametrize("cut", [[2, 1], [1, 2]], ids=str)
def test_a_layer_that_expects_the_tuple_itself_is_told_of_its_elements(cut: list[int], executor: str) -> None:
    layers = [Listing(), TakesOne(), Block()]
    pipe = pipeline(layers, num_ranks=2, partition=cut, loss_fn=None, executor=executor)
    with pytest.raises(TypeError, match="takes 2 positional arguments but 3 were given") as caught:
        pipe.eval_step(torch.randn(8, WIDTH))
    notes = "".join(caught.value.__notes__)
    assert (
        "TakesOne.forward got 2 arguments, the inputs of the step or the elements of a tuple" in notes
        and "NamedTuple" in notes
    )


class Needs(nn.Module):
    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> Any:
        return x + skip


@pytest.mark.parametrize("cut", [[2, 1], [1, 2]], ids=str)
def test_a_layer_that_needs_what_nothing_carries_is_told_its_name(cut: list[int]) -> None:
    pipe = pipeline([Block(), Block(), Needs()], num_ranks=2, partition=cut, loss_fn=None)
    with pytest.raises(TypeError, match="missing 1 required") as caught:
        pipe.eval_step(torch.randn(8, WIDTH))
    assert "Needs.forward needs skip: no layer before it carries" in "".join(caught.value.__notes__)


@pytest.mark.parametrize("cut", [[2, 1], [1, 2]], ids=str)
def test_an_input_by_the_name_that_later_layers_give_theirs_is_explained(cut: list[int]) -> None:
    pipe = pipeline([Block(), Block(), Block()], num_ranks=2, partition=cut, loss_fn=None)
    with pytest.raises(TypeError, match="multiple values for argument 'x'") as caught:
        pipe.eval_step(x=torch.randn(8, WIDTH))
    assert "Block.forward gets x by position, from step or the layer before, and again from x= of step" in "".join(
        caught.value.__notes__
    )
