"""One rank of a pipeline on a GPU that it shares: ``python -m tests.gpu.ranks SCHEDULE DTYPE EXECUTOR``.

NCCL refuses two ranks on one device of a host. With another NCCL_HOSTID each they pass for several hosts and talk over
sockets: that is for correctness, and says nothing about speed.
"""

from __future__ import annotations

import copy
import os
import signal
import sys
import time

import torch
from torch import nn

import fastpipe
from fastpipe.testing import reference_step
from tests.gpu.models import batch, layers, loss_fn
from tests.runtime.checks import same_bits


def main() -> None:
    schedule, name, executor = sys.argv[1:]
    dtype = getattr(torch, name)
    torch.cuda.set_device(0)
    model = layers(2 * int(os.environ["WORLD_SIZE"]), dtype)
    unsplit = nn.Sequential(*copy.deepcopy(model))
    recorded = "RECORDED" in os.environ
    pipe = fastpipe.Pipeline(
        model, schedule, 8, loss_fn, executor=executor, device="cuda", timeout=100, cuda_graph=recorded
    )
    x, target = batch(32, dtype)
    reference = reference_step(unsplit, (x, target), pipe.schedule, loss_fn)
    expected = {key: parameter.grad for key, parameter in unsplit.named_parameters()}
    for _ in range(8 if recorded else 3):
        for parameter in pipe.parameters():
            parameter.grad = None
        result = pipe.step(x, target=target)
        assert same_bits(result.loss.cpu(), reference.loss.cpu()), "the loss differs"
        for key, parameter in pipe.named_parameters():
            assert same_bits(parameter.grad.cpu(), expected[key].cpu()), f"the gradient of {key} differs"
    print("ok", pipe.transport.describe())
    if recorded:
        print(pipe.describe())
    if "VICTIM" in os.environ:
        lose(pipe, x, target)


def lose(pipe: fastpipe.Pipeline, x: torch.Tensor, target: torch.Tensor) -> None:
    """One more step, in which the rank VICTIM is killed while the others wait for what it has not computed."""
    if os.environ["RANK"] == os.environ["VICTIM"]:
        module = next(iter(pipe.stage_modules.values()))
        module.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    start = time.perf_counter()
    try:
        pipe.step(x, target=target)
        torch.cuda.synchronize()
    except fastpipe.StepError as error:
        torch.cuda.synchronize()
        print("lost", error.rank, time.perf_counter() - start < 20)


if __name__ == "__main__":
    main()
