"""Microbatches of one batch: what a layer does to one of them is nothing to the others; their outputs as one."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from fastpipe import Pipeline
from fastpipe.runtime.model.chain import Chain
from fastpipe.runtime.step.microbatch import check_merge_rules, count_rows, merge, split
from fastpipe.testing import reference_step
from tests.runtime.checks import assert_same, same_bits
from tests.runtime.tree_models import Pair, State

WIDTH = 8


class Normalises(nn.Module):
    """Changes its input in place, as preprocessing does, and the keyword argument too."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x.sub_(0.5).mul_(scale.exp_())


class Adds(nn.Module):
    """Adds a parameter in place: what came in has a graph from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        x += self.position
        return x * scale.sigmoid_()


def cubed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output * target.abs_()).pow(3).mean()


def layers_of(first: type[nn.Module]) -> list[nn.Module]:
    torch.manual_seed(3)
    return [first(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]


def batch_of(rows: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    return {name: torch.randn(rows, WIDTH) for name in ("x", "scale", "target")}


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb_h1"])
@pytest.mark.parametrize("first", [Normalises, Adds])
def test_the_batch_may_be_changed_in_place(first: type[nn.Module], schedule: str, executor: str) -> None:
    ours, theirs = batch_of(9), batch_of(9)
    unsplit = Chain(dict(enumerate(layers_of(first))))
    pipe = Pipeline(layers_of(first), schedule, 4, cubed, num_ranks=2, executor=executor)
    result = pipe.step(ours["x"], scale=ours["scale"], target=ours["target"])
    batch: Any = (theirs["x"], theirs["target"])
    reference = reference_step(unsplit, batch, pipe.schedule, cubed, kwargs={"scale": theirs["scale"]})
    assert_same(pipe, result, unsplit, reference)
    for name in ours:
        assert same_bits(ours[name], theirs[name]) and not ours[name].requires_grad, name
    assert not same_bits(ours["x"], batch_of(9)["x"]), "the user's own tensor, as without a pipeline"


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("gradient", [False, True])
def test_nothing_is_copied(gradient: bool, dim: int) -> None:
    """Wherever it is cut, and however its memory is laid out."""
    whole = torch.randn(9, 7, 6)[:, ::2].transpose(0, 1).requires_grad_(gradient)
    parts, views = split(whole, 3, dim, "x"), whole.tensor_split(3, dim)
    for part, view in zip(parts, views, strict=True):
        assert part.data_ptr() == view.data_ptr() and part.stride() == view.stride() and part.shape == view.shape
        assert part.requires_grad == gradient


class Embeds(nn.Linear):
    """Takes its input by whatever name it is given."""

    def forward(self, x: torch.Tensor, scale: Any = None) -> torch.Tensor:
        return super().forward(x if scale is None else x * scale)


class Scores(nn.Linear):
    """The model's own loss."""

    def forward(self, hidden: torch.Tensor, labels: Any) -> torch.Tensor:
        return cubed(super().forward(hidden), labels)


class Scored(nn.Sequential):
    """The unsplit model."""

    def forward(self, *args: torch.Tensor, labels: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = self[1](self[0](*args, **kwargs), labels=labels)
        return loss


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("x",), ("labels",)),
        ((), ("x", "labels")),
        ((), ("labels", "x")),
        (("x", 2.0), ("labels",)),
        ((), ("x", "scale", "labels")),
    ],
)
def test_microbatches_weigh_by_their_rows_wherever_these_are(
    args: tuple[Any, ...], named: tuple[str, ...], executor: str
) -> None:
    """The rows are those of the first argument that has any, by position or by name."""
    torch.manual_seed(3)
    model = Scored(Embeds(WIDTH, WIDTH), Scores(WIDTH, WIDTH))
    batch = {"x": torch.randn(7, WIDTH), "labels": torch.randn(7, WIDTH), "scale": 2.0}
    pipe = Pipeline(copy.deepcopy(list(model)), "1f1b", 4, num_ranks=2, executor=executor)
    given = tuple(batch[value] if isinstance(value, str) else value for value in args)
    kwargs = {name: batch[name] for name in named}
    result = pipe.step(*given, **kwargs)
    reference = reference_step(model, (given, None), pipe.schedule, kwargs=kwargs)
    assert_same(pipe, result, model, reference)
    assert torch.allclose(reference.loss, model(*given, **kwargs)), "which is the whole batch's"


def test_a_single_row_is_shared_also_beside_lists_of_microbatches(executor: str) -> None:
    torch.manual_seed(3)
    model = [Embeds(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    x, target, row = torch.randn(7, WIDTH), torch.randn(7, WIDTH), torch.randn(1, WIDTH)
    pipe = Pipeline(model, "1f1b", 3, cubed, num_ranks=2, executor=executor)
    whole = pipe.step(x, target=target.clone(), scale=row)
    parts = pipe.step(list(x.tensor_split(3)), target=list(target.clone().tensor_split(3)), scale=row)
    assert same_bits(whole.loss, parts.loss)
    pipe = Pipeline(copy.deepcopy(model), "1f1b", 3, num_ranks=2, executor=executor)
    with pytest.raises(ValueError, match="^x has 1 row but num_microbatches = 3: give at least one row per microbatch"):
        pipe.step(x=row)


def test_what_every_microbatch_gets_whole_has_no_rows_of_its_own() -> None:
    table, x = torch.randn(3, WIDTH), torch.randn(5, WIDTH)
    whole, cut = [table] * 2, split(x, 2, 0, "x")
    assert count_rows(None, [whole, cut], {}, {0: "replicate"}) == ((1, 1), [3, 2])
    assert count_rows(None, [[2.0, 2.0]], {"table": whole, "x": cut}, None) == ((2, 1), [3, 2])
    assert count_rows(cut, [], {"x": whole}, None) == ((0, 0), [3, 2])
    assert count_rows([None, None], [whole], {}, None) is None


def jagged() -> torch.Tensor:
    """A batch of two rows of one and two elements."""
    return torch.nested.nested_tensor_from_jagged(torch.ones(3), torch.tensor([0, 1, 3]))


A, B = torch.arange(6.0).reshape(2, 3), torch.arange(3.0).reshape(1, 3)
BOTH = torch.cat([A, B])


def test_one_microbatch_gets_a_packed_sequence_as_it_is() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    assert split(packed, 1, 0, "x") == [packed]


def test_trees_keep_their_classes() -> None:
    assert torch.equal(merge([A, B], None), BOTH)
    merged = merge([(A, [A, A]), (B, [B, B])], None)
    assert type(merged) is tuple and type(merged[1]) is list and torch.equal(merged[1][1], BOTH)
    merged = merge([Pair(A, A), Pair(B, B)], None)
    assert type(merged) is Pair and torch.equal(merged.right, BOTH)
    merged = merge([State(A, 1), State(B, 1)], None)
    assert type(merged) is State and torch.equal(merged.hidden, BOTH) and merged.depth == [1, 1]
    merged = merge([{"x": {"y": A}, "z": None}, {"x": {"y": B}, "z": None}], None)
    assert torch.equal(merged["x"]["y"], BOTH) and merged["z"] == [None, None]
    merged = merge([{"x": A, "y": B}, {"y": A, "x": B}], None)
    assert torch.equal(merged["x"], BOTH) and torch.equal(merged["y"], torch.cat([B, A]))
    with pytest.raises(ValueError, match="do not have the same entries"):
        merge([{"x": A}, {"y": B}], None)


@pytest.mark.parametrize(
    ("outputs", "rules", "read"),
    [
        ([{"a": A, "b": A}, {"a": A, "b": A}], {"a": 1}, lambda m: m["a"]),
        ([Pair(A, A), Pair(A, A)], {"left": 1}, lambda m: m.left),
        ([State(A, 0), State(A, 0)], {"hidden": 1}, lambda m: m.hidden),
        ([(A, A), (A, A)], {1: 1}, lambda m: m[1]),
        ([{"a": [A]}, {"a": [A]}], {"a": 1}, lambda m: m["a"][0]),
    ],
)
def test_a_rule_goes_by_the_name(outputs: list[Any], rules: Any, read: Any) -> None:
    assert torch.equal(read(merge(outputs, rules)), torch.cat([A, A], 1))


@pytest.mark.parametrize(
    ("outputs", "rules", "message"),
    [
        ([Pair(A, A)], {"middle": 0}, r"merge\['middle'\]: the model has no such output; .*\['left', 'right'\]"),
        ([State(A, 1)], {0: 0}, r"merge\[0\].*\['hidden', 'depth'\]"),
        ([(A, A), (B,)], None, "do not have the same entries"),
        ([torch.ones(2, 3), torch.ones(2, 3)], 7, r"shape \(2, 3\) cannot be concatenated along dimension 7"),
        ([torch.ones(2, 3), torch.ones(2, 4)], 0, r"\(2, 3\) and \(2, 4\) cannot be concatenated along dimension 0"),
        ([jagged(), jagged()], 0, r"shape \(2, j\d+\) and \(2, j\d+\) cannot be concatenated along dimension 0"),
    ],
)
def test_what_does_not_fit_is_refused(outputs: list[Any], rules: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_merge_rules(outputs[0], rules)
        merge(outputs, rules)


def test_what_is_a_tensor_in_some_microbatches_only_is_listed() -> None:
    assert merge([{"x": A}, {"x": None}], None)["x"][1] is None
