"""A step runs on the rank's own cores, and what is around it on all."""

import os
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fastpipe
from tests.distributed.ranks import ranks


class Noting(nn.Linear):
    """Notes where it runs."""

    def forward(self, x: Any) -> Any:
        seen.append(os.sched_getaffinity(0))
        return super().forward(x)


seen: list[set[int]] = []


def steps(asked: str) -> tuple[set[int], list[set[int]], set[int], str]:
    """Runs on every rank: where it may run before, in and after steps, and what the pipeline says of it."""
    torch.set_num_threads(1)
    seen.clear()
    before = os.sched_getaffinity(0)
    as_torchrun = {"LOCAL_RANK": str(dist.get_rank()), "LOCAL_WORLD_SIZE": "2"}
    with patch.dict(os.environ, {**as_torchrun, "FASTPIPE_PIN": asked}):
        pipe = fastpipe.Pipeline([Noting(2, 2), Noting(2, 2)], "1f1b", 2, nn.functional.mse_loss)
    x = torch.ones(4, 2)
    for _ in range(2):
        pipe.step(x, target=x)
    return before, list(seen), os.sched_getaffinity(0), pipe.describe()


@pytest.mark.parametrize("asked", ["1", "0"])
def test_a_step_runs_on_the_ranks_own_cores(asked: str) -> None:
    with ranks(2) as group:
        (all_cores, first, *_), (_, second, *_) = found = group.run(steps, asked)
    share = len(all_cores) // 2 if asked == "1" else 0
    for before, inside, after, text in found:
        assert before == after == all_cores and len(inside) == 4
        assert {len(cores) for cores in inside} == {share or len(all_cores)}
        assert ("while a step runs (FASTPIPE_PIN)" in text) == (share > 0)
    if share:
        assert first[0].isdisjoint(second[0])
