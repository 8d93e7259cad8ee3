"""What a loss function returns beside the loss, and the rules by which it is reported."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fastpipe import Pipeline
from tests.runtime.checks import same_bits
from tests.runtime.models import CASES, WIDTH, measured, squared


def test_a_loss_in_a_dict_with_metrics(executor: str) -> None:
    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> dict[str, Any]:
        loss, metrics = measured(output, target)
        return {"loss": loss, **metrics}

    batch = CASES["plain"].batches(1, 9)[0]
    results = []
    for loss in (loss_fn, measured):
        pipe = Pipeline(CASES["plain"].layers(4), "1f1b", 4, loss, num_ranks=2, executor=executor, metrics="list")
        results.append(pipe.step(*batch.args, target=batch.target))
    first, second = results
    assert same_bits(first.loss, second.loss) and first.metrics.keys() == second.metrics.keys() != set()
    assert all(
        same_bits(a, b)
        for name in first.metrics
        for a, b in zip(first.metrics[name], second.metrics[name], strict=True)
    )
    assert all(len(values) == 4 and not values[0].requires_grad for values in first.metrics.values())


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (lambda loss: {"error": loss}, "returned a dict with .*'error'.*: its loss goes under 'loss'"),
        (lambda loss: (loss, loss), r"returned a tuple of Tensor, Tensor: return the loss, or \(loss, dict\)"),
        (lambda loss: (loss, {"name": "text"}), "metric 'name' as a str"),
        (lambda loss: (loss, {3: loss}), "metric under 3"),
        (lambda loss: ("text", {}), "loss_fn returned a str"),
    ],
)
def test_what_is_no_loss_with_metrics(returned: Callable[[torch.Tensor], Any], text: str, executor: str) -> None:
    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> Any:
        return returned(squared(output, target))

    pipe = Pipeline(CASES["plain"].layers(4), "1f1b", 4, loss_fn, num_ranks=2, executor=executor)
    with pytest.raises(ValueError, match=text):
        pipe.step(torch.randn(8, WIDTH), target=torch.randn(8, WIDTH))


def test_sums_of_counts_are_whole_numbers(executor: str) -> None:
    """As torch's own sum counts them, whatever small type they come in."""

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> Any:
        many = {"bytes": torch.tensor(200, dtype=torch.uint8), "ints": torch.tensor(2**31 - 5, dtype=torch.int32)}
        return squared(output, target), {"any": (output > -9e9).any(), "true": True, "half": torch.tensor(0.5), **many}

    pipe = Pipeline(CASES["plain"].layers(4), "1f1b", 4, loss_fn, num_ranks=2, executor=executor, metrics="sum")
    found = pipe.step(torch.randn(8, WIDTH), target=torch.randn(8, WIDTH)).metrics
    expected = {"any": 4, "true": 4, "bytes": 800, "ints": 4 * (2**31 - 5), "half": 2.0}
    assert {name: value.item() for name, value in found.items()} == expected


def test_a_metric_has_to_come_always_and_a_rule_has_to_be_for_one() -> None:
    calls = iter(range(100))

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> Any:
        return squared(output, target), {"odd": 1.0} if next(calls) % 2 else {}

    x, y = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    pipe = Pipeline(CASES["plain"].layers(2), "1f1b", 4, loss_fn, num_ranks=1)
    with pytest.raises(ValueError, match=r"metric 'odd' .*\[1, 3\] of 4"):
        pipe.step(x, target=y).metrics  # noqa: B018
    rows = Pipeline(CASES["plain"].layers(2), "1f1b", 3, lambda o, t: (squared(o, t), {"rows": o[:, 0]}), num_ranks=1)
    with pytest.raises(ValueError, match=r"metric 'rows' .*\(2,\) and \(3,\)"):
        rows.step(x, target=y).metrics  # noqa: B018
    pipe = Pipeline(CASES["plain"].layers(2), "1f1b", 4, measured, num_ranks=1, metrics={"hit": "sum"})
    with pytest.raises(ValueError, match=r"metrics\['hit'\]: .*'hits'"):
        pipe.step(x, target=y).metrics  # noqa: B018


@pytest.mark.parametrize(("rules", "text"), [("max", "metrics = 'max'"), ({"a": 3}, r"metrics\['a'\] = 3")])
def test_rules_that_are_none(rules: Any, text: str) -> None:
    with pytest.raises(ValueError, match=f"{text}: use 'mean', 'sum', 'list' or a function"):
        Pipeline(CASES["plain"].layers(2), "1f1b", 4, measured, num_ranks=2, metrics=rules)
