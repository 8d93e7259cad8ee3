"""Steps of small pipelines, to be run under a sanitizer: by threads, or under RANK and WORLD_SIZE by processes."""

from __future__ import annotations

import os

import torch
from torch import nn

from fastpipe import Pipeline, StepError
from fastpipe.testing import Fault

COUNT = 4


def train(schedule: str, transport: str) -> None:
    """Two steps, one that fails, and another one."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]
    layers[1] = Fault(layers[1], 2 * COUNT + 1, ValueError("on purpose"))
    pipe = Pipeline(
        layers, schedule, COUNT, nn.functional.mse_loss, num_ranks=2, executor="native", transport=transport
    )
    x, target, failures = torch.randn(8, 8), torch.randn(8, 8), 0
    for _ in range(4):
        try:
            pipe.step(x, target=target, trace=True)
        except (ValueError, StepError):
            failures += 1
    assert failures == 1
    pipe.eval_step(x, target=target, gather_outputs=True)
    print(schedule, transport, "ok", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for transport in ("shared_memory", "process_group") if "RANK" in os.environ else ("auto",):
        for schedule in ("1f1b", "zbv", "dualpipev"):
            train(schedule, transport)
