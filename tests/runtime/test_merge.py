"""The outputs of all microbatches as one: in every tree, under its own names."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastpipe.runtime.step.microbatch import merge
from tests.runtime.tree_models import Pair, State

A, B = torch.arange(6.0).reshape(2, 3), torch.arange(3.0).reshape(1, 3)
BOTH = torch.cat([A, B])


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
    ],
)
def test_what_does_not_fit_is_refused(outputs: list[Any], rules: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        merge(outputs, rules)


def test_what_is_a_tensor_in_some_microbatches_only_is_listed() -> None:
    assert merge([{"x": A}, {"x": None}], None)["x"][1] is None
