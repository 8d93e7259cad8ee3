"""Buckets of DistributedDataParallel start while the stage's last backward runs; two replicas of one process each."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from fastpipe import Pipeline
from fastpipe.runtime.data_parallel.ddp import Replicated
from tests.conftest import BOTH
from tests.distributed.meshes import Block, Reference, build, mesh, wrong_gradients
from tests.distributed.ranks import GroupOf
from tests.distributed.test_data_parallel_wrappers import SPLIT, WHOLE, by_hand, step
from tests.runtime.checks import same_bits


@contextmanager
def restored() -> Iterator[None]:
    """Leaves `Replicated.reduce_grad`, which `Events` replaces, as it was."""
    kept = Replicated.reduce_grad
    try:
        yield
    finally:
        Replicated.reduce_grad = kept  # type: ignore[method-assign]


class Events(list[str]):
    """What happens in a step: buckets that start, and REDUCE_GRAD."""

    def __init__(self) -> None:
        super().__init__()
        self.reduce_grad = Replicated.reduce_grad
        events = self

        def noted(parallel: Replicated, failed: bool) -> None:
            events.append(f"REDUCE_GRAD {parallel.stage}")
            self.reduce_grad(parallel, failed)

        Replicated.reduce_grad = noted  # type: ignore[method-assign]

    def take(self) -> str:
        """The events since the last call: each word once, where it begins."""
        words = [word for i, word in enumerate(self) if i == 0 or self[i - 1] != word]
        self.clear()
        return ", ".join(words)


def wrap_small(events: list[str]) -> Callable[[nn.Module, DeviceMesh], nn.Module]:
    """DistributedDataParallel with a bucket a parameter, which notes when it is reduced."""

    def wrap(module: nn.Module, over: DeviceMesh) -> nn.Module:
        group = over.get_group()
        # without find_unused_parameters torch begins with one bucket for all
        wrapped = DistributedDataParallel(
            module, process_group=group, bucket_cap_mb=0.00001, find_unused_parameters=True
        )

        def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            events.append("buckets")
            work = dist.all_reduce(bucket.buffer().div_(2), group=group, async_op=True)
            return work.get_future().then(lambda future: future.value()[0])

        wrapped.register_comm_hook(None, hook)
        return wrapped

    return wrap


@restored()
def overlap(executor: str, order: str) -> list[str]:
    over = mesh()
    replica = over.get_local_rank("dp")
    events = Events()
    pipe = build(wrap_small(events), by_hand(order), executor, over, num_microbatches=None)
    reference = Reference(pipe)
    found = []
    for number in range(3):
        step(pipe, number, replica)
        reference.step(number)
        assert not wrong_gradients(pipe, reference)
        found.append(events.take())
    return found


EARLY = "buckets, REDUCE_GRAD 1, buckets, REDUCE_GRAD 0"
LATE = "REDUCE_GRAD 1, buckets, REDUCE_GRAD 0, buckets"


@BOTH
def test_buckets_start_in_the_last_backward(executor: str, group_of: GroupOf) -> None:
    """Whole backwards: from the first step on."""
    for found in group_of(2).run(overlap, executor, WHOLE):
        # a layer's weight is frozen: its bucket, if it had one, would be the last and come at REDUCE_GRAD
        assert found == [EARLY] * 3


@BOTH
def test_buckets_start_in_the_last_w(executor: str, group_of: GroupOf) -> None:
    """The native executor says after the first step which gradients come in W."""
    for found in group_of(2).run(overlap, executor, SPLIT):
        assert found == [EARLY if executor == "python" else LATE, EARLY, EARLY]


def test_a_reduction_that_stands_elsewhere_waits_for_its_place(executor: str, group_of: GroupOf) -> None:
    """Other replicas are met between the last backward of a stage and its REDUCE_GRAD: the order must not change."""
    order = WHOLE + " 1REDUCE_GRAD 0REDUCE_GRAD"
    for found in group_of(2).run(overlap, executor, order):
        # stage 0's is the last backward of all, but stage 1's REDUCE_GRAD stands between
        assert found == [LATE] * 3


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


@restored()
def meddle(executor: str) -> list[str]:
    over = mesh()
    replica = over.get_local_rank("dp")
    events = Events()
    pipe = build(wrap_small(events), by_hand(WHOLE), executor, over, made=meddling_layers, num_microbatches=None)
    found = []
    for number in range(2):
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
        found.append(events.take())
    return found


def clear(pipe: Pipeline) -> None:
    for parameter in pipe.parameters():
        parameter.grad = None


def test_what_changes_after_its_bucket_has_started_is_averaged_again(executor: str, group_of: GroupOf) -> None:
    """And from then on nothing starts too early."""
    for first, second in group_of(2).run(meddle, executor):
        assert first == EARLY + ", buckets"
        assert second == LATE


@restored()
def fails_early(executor: str) -> str:
    """One replica fails in the last backward, with buckets under way."""
    over = mesh()
    replica = over.get_local_rank("dp")
    events = Events()
    pipe = build(wrap_small(events), by_hand(WHOLE), executor, over, num_microbatches=None)
    first = next(pipe.stage_modules[1].parameters())
    counts = {"calls": 0}

    def fail(_: torch.Tensor) -> None:
        counts["calls"] += 1
        if replica == 1 and counts["calls"] == 2:
            raise RuntimeError("mishap")

    handle = first.register_post_accumulate_grad_hook(fail)
    try:
        step(pipe, 0, replica)
        return "did not fail"
    except Exception as error:
        message = str(error)
    handle.remove()
    clear(pipe)
    reference = Reference(pipe)
    step(pipe, 1, replica)
    reference.step(1)
    assert not wrong_gradients(pipe, reference)
    return message


def test_a_failure_with_buckets_under_way(executor: str, group_of: GroupOf) -> None:
    other, own = group_of(2).run(fails_early, executor)
    assert "mishap" in own and "in 1 of 2 replicas" in other
