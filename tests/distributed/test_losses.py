"""What several processes report: metrics and added losses, the same on every rank and those of the unsplit model."""

from typing import Any

import pytest
import torch

from fastpipe import Pipeline
from tests.conftest import paired
from tests.distributed.ranks import GroupOf
from tests.runtime.checks import train_and_compare
from tests.runtime.models import Balanced, measured


def compare(case: str, schedule: str, executor: str, transport: str) -> None:
    train_and_compare(case, schedule, 8, executor=executor, transport=transport, steps=2)


@pytest.mark.parametrize(
    ("schedule", "executor"),
    paired(["interleaved_zb", "dualpipev", "dualpipe"]),
    indirect=["executor"],
)
def test_added_losses_and_metrics(schedule: str, executor: str, group_of: GroupOf) -> None:
    transport = "shared_memory" if executor == "native" else "process_group"
    for case in ("added_losses", "metrics"):
        group_of(2).run(compare, case, schedule, executor, transport)


def report(executor: str) -> dict[str, Any]:
    """Weighed by the target, which only the rank of the last stage has."""
    torch.manual_seed(1)
    layers = [Balanced() for _ in range(4)]
    x = [torch.randn(rows, 6) for rows in (1, 5, 2, 4)]
    y = [torch.randn(rows, 6) for rows in (1, 5, 2, 4)]
    options = {"loss_reduction": lambda target: float(target.abs().sum()), "metrics": {"rows": "list", "hits": "sum"}}
    pipe = Pipeline(layers, "1f1b", 4, measured, executor=executor, **options)
    result = pipe.step(x if pipe.needs_input else None, target=y if pipe.needs_target else None)
    return {
        "rank": pipe.rank,
        "metrics": {name: torch.stack(v) if isinstance(v, list) else v for name, v in result.metrics.items()},
        "added": result.added_losses,
    }


def test_every_rank_has_all_of_them(executor: str, group_of: GroupOf) -> None:
    answers = group_of(2).run(report, executor)
    assert [answer["rank"] for answer in answers] == [0, 1]
    first = answers[0]
    for answer in answers:
        for kind in ("metrics", "added"):
            assert answer[kind].keys() == first[kind].keys()
            assert all(torch.equal(answer[kind][name], value) for name, value in first[kind].items())
    assert first["metrics"]["rows"].tolist() == [1, 5, 2, 4] and first["metrics"]["by_column"].shape == (6,)
    assert set(first["added"]) == {"balance", "size"} and all(value > 0 for value in first["added"].values())
