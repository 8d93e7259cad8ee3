"""What several processes report is the same on every rank; that it is the unsplit model's is in test_bits.py."""

from typing import Any

import torch

from fastpipe import Pipeline
from tests.distributed.ranks import GroupOf
from tests.runtime.models import Balanced, measured


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
