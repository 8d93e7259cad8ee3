"""What a step looks at to know whether shapes may have changed: every change is noticed, and nothing else."""

import copy
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from fastpipe import Pipeline
from fastpipe.runtime.model.modules import flags_of
from fastpipe.runtime.step.agreement import batch_digests
from fastpipe.runtime.step.inputs import Inputs, Request, signature_of
from fastpipe.runtime.step.microbatch import rows_of, split


class Pair(NamedTuple):
    """A tree of its own kind."""

    a: Any
    b: Any


class Tracker:
    """No tree, and no constant."""


def look(**changes: Any) -> Any:
    """Of two microbatches with everything that there is."""
    one = (torch.zeros(2, 3), {"mask": torch.ones(2, dtype=torch.bool), "scale": 2.0}, [None, "text"])
    given: dict[str, Any] = {"args": [one, copy.deepcopy(one)], "kwargs": {"x": [Pair(torch.zeros(1), 1)] * 2}}
    taken = Inputs(**given | {"targets": [torch.zeros(2), torch.zeros(2)]} | changes)
    request = Request((taken.args,), taken.kwargs, taken.targets, taken.output_grads, 2, training=True)
    return signature_of(request, taken, None)


def test_other_values_look_the_same() -> None:
    other = look(targets=[torch.ones(2), torch.full((2,), 5.0)])
    assert hash(other) == hash(look()) and other == look()


@pytest.mark.parametrize(
    "changes",
    [
        {"targets": [torch.zeros(2), torch.zeros(3)]},
        {"targets": [torch.zeros(2), torch.zeros(2, dtype=torch.float64)]},
        {"targets": [torch.zeros(2), torch.zeros(2, requires_grad=True)]},
        {"targets": [torch.zeros(2)]},
        {"targets": [torch.zeros(2), torch.zeros(4)[::2]]},
        {"targets": None},
        {"output_grads": [(torch.zeros(2),), (torch.zeros(2),)]},
        {"targets": [torch.zeros(2), 2]},
        {"args": [(torch.zeros(2, 3),)] * 2},
        {"args": None},
        {"kwargs": {}},
        {"kwargs": {"y": [Pair(torch.zeros(1), 1)] * 2}},
        {"kwargs": {"x": [Pair(torch.zeros(1), 2)] * 2}},
        {"kwargs": {"x": [Pair(torch.zeros(1), None)] * 2}},
        {"kwargs": {"x": [Pair(torch.zeros(1), Tracker())] * 2}},
    ],
)
def test_another_look_is_seen(changes: dict[str, Any]) -> None:
    assert look(**changes) != look()


def test_numbers_with_one_hash_differ() -> None:
    hashes = {hash(look(kwargs={"dim": [value] * 2})) for value in (-1, -2, 1, 1.0, True, "1")}
    assert len(hashes) == 6


def test_strides_that_nothing_uses_look_the_same() -> None:
    rows = torch.zeros(2, 6)
    assert look(targets=[rows[:1, :3], rows[:0, :3]]) == look(targets=[rows[:1, 3:], rows[2:, :3]])
    assert look(targets=[torch.zeros(1, 3)]) == look(targets=[rows[:1, :3]])


def test_what_has_no_strides_looks_like_something() -> None:
    assert look(targets=[torch.eye(2).to_sparse()]) != look(targets=[torch.eye(2)])
    assert look(targets=[torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)])


@pytest.mark.parametrize("other", [torch.zeros(5, 2), torch.zeros(6, 2, dtype=torch.int64), torch.zeros(2, 6).t()])
def test_a_whole_batch_looks_like_its_shape_and_a_list_like_its_microbatches(other: torch.Tensor) -> None:
    def of(value: Any, rule: Any) -> Any:
        request = Request((), {"x": value}, None, None, 2, training=False)
        return signature_of(request, Inputs(kwargs={"x": split(value, 2, rule, "x")}), {"x": rule})

    batch = torch.zeros(6, 2)
    for rule, wrap in (
        (0, lambda x: x),
        (0, lambda x: {"a": [x]}),
        (lambda x, count: list(x.chunk(count)), lambda x: x),
    ):
        assert of(wrap(batch), rule) == of(wrap(batch.clone()), rule) != of(wrap(other), rule)
    halves = of([batch[:3], batch[3:]], 0)
    assert halves == of([batch[3:], batch[:3]], 0) != of([batch[:2], batch[2:]], 0)


def digest(value: torch.Tensor, whole: bool = True) -> Any:
    return batch_digests(Request((), {}, value, None, 1, training=True), Inputs(), whole)["target"]


def test_what_a_sample_reads_is_from_everywhere() -> None:
    rows = torch.zeros(64, 2048)
    for value in (rows, rows.t()):
        before = digest(value, whole=False)
        changed = value.clone(memory_format=torch.preserve_format)
        changed[:, 1:].add_(1)  # and nothing in the first column
        assert digest(changed, whole=False) != before == digest(value.clone(), whole=False)


def test_what_a_mark_negates_is_read_as_it_is() -> None:
    value = torch.complex(torch.ones(2), torch.arange(2.0))
    for marked in (value.conj(), value.conj().imag):
        found, expected = (digest(one) for one in (marked, marked.clone()))
        assert found == expected != digest(value)


def test_what_is_no_tensor_looks_like_its_type() -> None:
    looks = [look(targets=[Tracker(), Tracker()]) for _ in range(2)]
    assert looks[0] == looks[1]


def test_a_nested_tensor_has_a_form_that_can_be_sent() -> None:
    value = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
    assert json.dumps(digest(value)) == json.dumps(digest(value.clone()))


def tree() -> nn.Module:
    shared = nn.Linear(2, 2)
    return nn.Sequential(shared, nn.Sequential(nn.BatchNorm1d(2), nn.Dropout()), shared)


@pytest.mark.parametrize(
    "change",
    [
        lambda module: module[0].weight.requires_grad_(False),
        lambda module: module[1][0].bias.requires_grad_(False),
        lambda module: module[1][1].eval(),
        lambda module: module.eval(),
        lambda module: module[0].bfloat16(),
        lambda module: module.register_parameter("more", nn.Parameter(torch.zeros(1))),
        lambda module: module[1].append(nn.Linear(2, 2)),
        lambda module: setattr(module[0], "weight", nn.Parameter(torch.zeros(2, 2), requires_grad=False)),
    ],
)
def test_a_changed_module_is_seen(change: Callable[[Any], Any]) -> None:
    module = tree()
    before = flags_of(module)
    assert flags_of(module) == before == flags_of(tree())
    change(module)
    assert flags_of(module) != before


def test_a_module_that_holds_itself_is_walked_once() -> None:
    module = nn.Linear(2, 2)
    module.register_module("again", module)
    module.register_module("nothing", None)
    assert len(flags_of(module)) == 3


def test_a_tensor_is_cut_like_a_tree_of_one() -> None:
    value = torch.arange(10.0).reshape(5, 2)
    for count in (1, 2, 5):
        whole, trees = split(value, count, 0, "x"), split((value,), count, 0, "x")
        assert all(torch.equal(part, in_tree) for part, (in_tree,) in zip(whole, trees, strict=True))
        assert rows_of(whole, 0) == rows_of(trees, 0)
    assert rows_of([{"a": 1, "b": value}], 0) == [5] and rows_of([{"a": 1}], 0) is None
    assert rows_of([torch.tensor(1.0)], 0) is None


def test_steps_announce_when_something_has_changed(executor: str) -> None:
    layers = [nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)) for _ in range(2)]
    pipe = Pipeline(layers, "1f1b", 2, nn.functional.mse_loss, num_ranks=2, executor=executor)
    x, y = torch.ones(4, 2), torch.ones(4, 2)

    def known() -> int:
        pipe.step(x, target=y)
        return len(pipe._steps.announced)

    assert known() == known() == 1
    layers[0][0].weight.requires_grad_(False)
    assert known() == 2
    layers[0][0].weight.requires_grad_(True)
    assert known() == 2
    pipe.eval()
    assert known() == 3
    with torch.autocast("cpu"):
        assert known() == 4
    x = torch.ones(6, 2)
    y = torch.ones(6, 2)
    assert known() == 5
