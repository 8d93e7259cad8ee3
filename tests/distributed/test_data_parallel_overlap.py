"""Buckets of DistributedDataParallel start while the stage's last backward runs; two replicas of one process each."""

import itertools
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fastpipe import Pipeline
from fastpipe.runtime import native
from fastpipe.runtime.data_parallel.ddp import Average, Replicated
from tests.conftest import BOTH
from tests.distributed.meshes import Block, Reference, build, mesh_and_replica, step, wrong_gradients
from tests.distributed.ranks import on_ranks
from tests.distributed.test_data_parallel_wrappers import SPLIT, WHOLE, by_hand, small_buckets
from tests.runtime.checks import same_bits


class Events(list[str]):
    """What happens in a step: buckets that start, and REDUCE_GRAD; within this context."""

    def __enter__(self) -> "Events":
        real = Replicated.reduce_grad

        def noted(parallel: Replicated, failed: bool) -> None:
            self.append(f"REDUCE_GRAD {parallel.stage}")
            real(parallel, failed)

        run = Average._run

        def noted_run(average: Average, bucket: Any) -> Any:
            self.append("buckets")
            return run(average, bucket)

        self.patches = ExitStack()
        self.patches.enter_context(mock.patch.object(Replicated, "reduce_grad", noted))
        self.patches.enter_context(mock.patch.object(Average, "_run", noted_run))
        return self

    def __exit__(self, *_: object) -> None:
        self.patches.close()

    def take(self) -> str:
        """The events since the last call: each word once, where it begins."""
        words = [word for i, word in enumerate(self) if i == 0 or self[i - 1] != word]
        self.clear()
        return ", ".join(words)

    def pipeline(self, executor: str, order: str, over: DeviceMesh, **more: Any) -> Pipeline:
        """With a bucket a parameter."""
        return build(small_buckets(None, 0.00001), by_hand(order), executor, over, num_microbatches=None, **more)


EARLY = "buckets, REDUCE_GRAD 1, buckets, REDUCE_GRAD 0"


LATE = "REDUCE_GRAD 1, buckets, REDUCE_GRAD 0, buckets"


@BOTH
@pytest.mark.parametrize("order", [WHOLE, SPLIT, WHOLE + " 1REDUCE_GRAD 0REDUCE_GRAD"])
@on_ranks(2)
def test_buckets_start_in_the_last_backward_or_w(order: str, executor: str) -> None:
    """Whole backwards: from the first step on. A layer's weight is frozen: its bucket, if it had one, would be the last
    and come at REDUCE_GRAD. Of split ones the native executor says after the first step which gradients come in W.

    Other replicas are met between the last backward of a stage and its REDUCE_GRAD, and their order must not change: in
    the last case stage 0's is the last backward of all, but stage 1's REDUCE_GRAD stands between.
    """
    over, replica = mesh_and_replica()
    with Events() as events:
        pipe = events.pipeline(executor, order, over)
        reference = Reference(pipe)
        found = []
        for number in range(3):
            step(pipe, number, replica)
            reference.step(number)
            assert not wrong_gradients(pipe, reference)
            found.append(events.take())
    first = LATE if order == SPLIT and executor == "native" else EARLY
    # without the extension W computes nothing that the buckets could overlap with
    is_late = "REDUCE" in order or (order == SPLIT and native.load() is None)
    assert found == ([LATE] * 3 if is_late else [first, EARLY, EARLY])


class Meddling(Block):
    """When the norm's bias has its gradient, which is among the last, that of the linear's bias is changed again."""

    def __init__(self) -> None:
        super().__init__()
        self.norm.bias.register_post_accumulate_grad_hook(self.meddle)

    def meddle(self, parameter: torch.Tensor) -> None:
        if self.linear.bias.grad is not None:
            self.linear.bias.grad += 1


def meddling_layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Meddling() for _ in range(4)]


@on_ranks(2)
def test_what_changes_after_its_bucket_has_started_is_averaged_again(executor: str) -> None:
    """And from then on nothing starts too early."""
    over, replica = mesh_and_replica()
    with Events() as events:
        pipe = events.pipeline(executor, WHOLE, over, made=meddling_layers)
        for number, expected in enumerate((EARLY + ", buckets", LATE)):
            clear(pipe)
            with pipe.no_sync():
                step(pipe, number, replica)
            own = [parameter.grad.clone() for parameter in pipe.parameters()]
            clear(pipe)
            events.clear()
            step(pipe, number, replica)
            for mine, parameter in zip(own, pipe.parameters(), strict=True):
                both = [torch.empty_like(mine) for _ in range(2)]
                dist.all_gather(both, mine, group=over["dp"].get_group())
                assert same_bits(parameter.grad, both[0] / 2 + both[1] / 2)
            assert events.take() == expected


def clear(pipe: Pipeline) -> None:
    for parameter in pipe.parameters():
        parameter.grad = None


@on_ranks(2)
def test_a_failure_with_buckets_under_way(executor: str) -> None:
    """One replica fails in the last backward."""
    over, replica = mesh_and_replica()
    pipe = Events().pipeline(executor, WHOLE, over)
    calls = itertools.count(1)

    def fail(_: torch.Tensor) -> None:
        if replica == 1 and next(calls) == 2:
            raise RuntimeError("mishap")

    handle = next(pipe.stage_modules[1].parameters()).register_post_accumulate_grad_hook(fail)
    with pytest.raises(Exception, match="mishap" if replica == 1 else "in 1 of 2 replicas"):
        step(pipe, 0, replica)
    handle.remove()
    clear(pipe)
    reference = Reference(pipe)
    step(pipe, 1, replica)
    reference.step(1)
    assert not wrong_gradients(pipe, reference)
