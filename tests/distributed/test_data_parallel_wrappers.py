"""What wrappers may be set to, and schedules that say where replicas meet; two replicas of one process each."""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.nn.parallel import DistributedDataParallel

from fastpipe import Pipeline, Placement, Schedule
from fastpipe.runtime.data_parallel.ddp import Replicated
from fastpipe.runtime.data_parallel.fsdp import Sharded
from fastpipe.runtime.data_parallel.interface import DataParallel
from tests.conftest import BOTH
from tests.distributed.meshes import (
    WIDTH,
    Block,
    Reference,
    batch,
    build,
    mesh,
    mesh_and_replica,
    shard,
    squared,
    step,
    whole_grad,
    wrong_gradients,
)
from tests.distributed.ranks import GroupOf, on_ranks
from tests.runtime.checks import same_bits

SPLIT = "0F0 1F0 0F1 1F1 1I0 0I0 1I1 0I1 1W0 1W1 0W0 0W1"
WHOLE = "0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1"
TORCH = "0UNSHARD 1UNSHARD 0F0 0F1 0RESHARD 1F0 1F1 0UNSHARD 1I0 0I0 1I1 1RESHARD 0I1 1W0 1W1 1REDUCE_GRAD 0W0 0W1"
"""As torch writes them: the last stage's reduction while the first still works, and none for the first."""


def by_hand(order: str) -> Schedule:
    return Schedule.from_actions("mine", Placement.custom([0, 0]), 2, [order.split()])


class Choosy(Block):
    """Some parameters are used by one replica alone, or by none."""

    def __init__(self) -> None:
        super().__init__()
        self.for_one = nn.Linear(WIDTH, WIDTH)
        self.for_none = nn.Linear(WIDTH, WIDTH)
        self.uses_it = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.for_one(x) if self.uses_it else x)


def choosy_layers(replica: int) -> list[nn.Module]:
    torch.manual_seed(0)
    made = [Choosy() for _ in range(4)]
    made[1].uses_it = made[2].uses_it = replica == 1
    return list(made)


class Either(Block):
    """Each replica uses a linear of its own, and none uses the third."""

    def __init__(self, replica: int) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.replica = replica

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.linears[self.replica](x))


def either_layers(replica: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Either(replica), *choosy_layers(replica)[1:]]


class HookedReference(Reference):
    """With parameters that only one replica's model uses."""

    def __init__(self, pipe: Pipeline, made: Callable[[int], list[nn.Module]] = choosy_layers) -> None:
        super().__init__(pipe)
        self.models = [nn.Sequential(*made(replica)) for replica in range(2)]


@on_ranks(2)
def test_options_of_ddp_and_parameters_without_gradients(executor: str) -> None:
    """Flags of DDP that concern its own backward change nothing; a parameter without a gradient takes no part."""
    over, replica = mesh_and_replica()
    for flags in ({}, {"find_unused_parameters": True}, {"static_graph": True}, {"gradient_as_bucket_view": True}):

        def wrap(module: nn.Module, over: DeviceMesh, flags: dict[str, Any] = flags) -> nn.Module:
            return DistributedDataParallel(module, process_group=over.get_group(), **flags)

        pipe = build(wrap, by_hand(SPLIT), executor, over, made=lambda: choosy_layers(replica), num_microbatches=None)
        reference = HookedReference(pipe)
        for number in range(2):
            step(pipe, number, replica)
            reference.step(number)
            assert not (wrong := wrong_gradients(pipe, reference)), (flags, wrong)
        grads = {name: p.grad for name, p in pipe.named_parameters()}
        assert grads["1.for_one.weight"] is not None and grads["1.for_none.weight"] is None
        assert grads["0.for_one.weight"] is None


@on_ranks(2)
def test_shards_whose_replicas_use_other_parameters(executor: str) -> None:
    """What one replica lacks is zero there, and has its place in the reduction; what both lack has no gradient."""
    over, replica = mesh_and_replica()
    for wrap in (shard, shard_in_bf16):
        made = partial(either_layers, replica)
        pipe = build(wrap, by_hand(SPLIT), executor, over, made=made, num_microbatches=None)
        reference = HookedReference(pipe, either_layers)
        for number in range(2):
            reference.put_aside()
            step(pipe, number, replica)
            reference.step(number)
            if wrap is shard:
                assert not (wrong := wrong_gradients(pipe, reference)), wrong
        grads = {name: whole_grad(parameter) for name, parameter in pipe.named_parameters()}
        assert grads["0.linears.0.weight"] is not None and grads["0.linears.2.weight"] is None
        for name, found in grads.items():
            expected = reference.grad(name)
            assert found is expected or torch.allclose(found, expected, atol=0.02), name


@on_ranks(2)
def test_shards_that_the_script_keeps_from_reducing_or_gathered(executor: str) -> None:
    """By FSDP's own settings, as for accumulation: what no step has used has no gradient, and every step begins with
    the optimizer's values."""
    over, replica = mesh_and_replica()
    pipe = build(shard, by_hand(SPLIT), executor, over, made=partial(either_layers, replica), num_microbatches=None)
    optimizer, reference = torch.optim.SGD(pipe.parameters(), 0.1), HookedReference(pipe, either_layers)
    for stage in pipe.stage_modules.values():
        stage.set_reshard_after_backward(False)
    for number in range(2):
        for stage in pipe.stage_modules.values():
            stage.set_requires_gradient_sync(number > 0)
        step(pipe, number, replica)
        reference.step(number, reduces=number > 0)
    assert not (wrong := wrong_gradients(pipe, reference)), wrong
    pipe.eval_step(batch(2, replica)[0])
    optimizer.step()
    for model in reference.models:
        torch.optim.SGD(model.parameters(), 0.1).step()
    assert float(step(pipe, 3, replica).loss) == reference.step(3)[replica]


@on_ranks(2)
def test_communication_hooks_are_kept(executor: str) -> None:
    """A communication hook gets undivided gradients, bucket by bucket, once per step."""
    over, replica = mesh_and_replica()
    seen: list[int] = []

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        seen.append(bucket.index())
        work = dist.all_reduce(bucket.buffer(), group=over["dp"].get_group(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0].div_(2))

    pipe = build(small_buckets(hook, 0.0001), by_hand(SPLIT), executor, over, num_microbatches=None)
    reference = Reference(pipe)
    step(pipe, 0, replica)
    reference.step(0)
    assert not wrong_gradients(pipe, reference)
    assert len(seen) > 4 and max(seen) > 1 and seen.count(0) == 2


def small_buckets(hook: Callable[..., Any] | None, megabytes: float) -> Callable[[nn.Module, DeviceMesh], nn.Module]:
    """DistributedDataParallel with buckets of so many bytes from the first step on, and a hook that reduces them."""

    def wrap(module: nn.Module, over: DeviceMesh) -> nn.Module:
        # without find_unused_parameters torch begins with one bucket for all
        options: dict[str, Any] = {"bucket_cap_mb": megabytes, "find_unused_parameters": True}
        wrapped = DistributedDataParallel(module, process_group=over.get_group(), **options)
        if hook is not None:
            wrapped.register_comm_hook(None, hook)
        return wrapped

    return wrap


@on_ranks(2)
def test_hooks_with_several_collectives(executor: str) -> None:
    """A second collective that is started when the first is complete, at another time in each replica, as PowerSGD's.

    Both have the size of all other buckets' collectives, so that mixing them up would be no error.
    """
    over, replica = mesh_and_replica()
    group = over["dp"].get_group()

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        half = bucket.buffer() / 4

        def second(first: torch.futures.Future[Any]) -> torch.Tensor:
            time.sleep(0.01 * (replica == bucket.index() % 2))
            dist.all_reduce(half, group=group)
            return first.value()[0] + half

        work = dist.all_reduce(half.clone(), group=group, async_op=True)
        return work.get_future().then(second)

    def made() -> list[nn.Module]:
        torch.manual_seed(0)
        return [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)]

    pipe = build(
        small_buckets(hook, 0.0001), by_hand(SPLIT), executor, over, made=made, num_microbatches=None, timeout=10.0
    )
    reference = Reference(pipe, made)
    step(pipe, 0, replica)
    reference.step(0)
    assert not (wrong := wrong_gradients(pipe, reference)), wrong


@on_ranks(2)
def test_uneven_inputs_are_refused() -> None:
    """A replica that has no batch left would answer the collectives of another order, which ends the process."""
    over, replica = mesh_and_replica()
    pipe = build("ddp", by_hand(WHOLE), "auto", over, num_microbatches=None)
    wrapper = pipe.stage_modules[1]
    with pytest.raises(ValueError, match="stage 1 was given to Join, .* equally often in all replicas"), wrapper.join():
        step(pipe, 0, replica)


@on_ranks(2)
def test_a_hook_for_buffers_is_refused() -> None:
    over, replica = mesh_and_replica()
    pipe = build("ddp", by_hand(WHOLE), "auto", over, num_microbatches=None)
    wrapper: Any = pipe.stage_modules[1]
    wrapper._register_buffer_comm_hook(None, lambda state, buffers: None)
    with pytest.raises(ValueError, match="stage 1 has a communication hook for buffers, .* leave it out"):
        step(pipe, 0, replica)


def normed() -> list[nn.Module]:
    torch.manual_seed(0)
    return [module for _ in range(2) for module in (nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))]


@on_ranks(2)
def test_buffers_come_from_the_first_replica(executor: str) -> None:
    """BatchNorm's statistics are the first replica's from the beginning of every step on, as with DDP alone."""
    over, replica = mesh_and_replica()
    pipe = build("ddp", by_hand(WHOLE), executor, over, made=normed, num_microbatches=None)
    starts: list[list[torch.Tensor]] = []

    def note(module: nn.Module, args: Any) -> None:
        starts.append([b.clone() for b in module.buffers()])

    pipe.stage_modules[0].module.register_forward_pre_hook(note)
    for number in range(2):
        step(pipe, number, replica)
    own = starts[2]
    first = [b.clone() for b in own]
    for buffer in first:
        dist.broadcast(buffer, 0)
    assert all(map(same_bits, own, first))
    ends = torch.stack([b.float().sum() for b in pipe.stage_modules[0].buffers()])
    other = ends.clone()
    dist.broadcast(other, 0)
    assert same_bits(ends, other) == (replica == 0)


@contextmanager
def recorded(kind: type[DataParallel]) -> Iterator[list[str]]:
    """The calls that an executor makes, by stage."""
    calls: list[str] = []

    def noting(name: str) -> Callable[..., None]:
        real = getattr(kind, name)

        def call(self: Any, *args: Any) -> None:
            calls.append(f"{self.stage}{name.upper()}")
            real(self, *args)

        return call

    with mock.patch.multiple(kind, **{name: noting(name) for name in ("unshard", "reshard", "reduce_grad")}):
        yield calls


@BOTH
@pytest.mark.parametrize(("wrap", "gathered"), [("ddp", 0), ("fsdp", 12)])
@on_ranks(2)
def test_both_executors_do_what_a_torch_schedule_says(wrap: str, gathered: int, executor: str) -> None:
    """A CSV with torch's own UNSHARD, RESHARD and REDUCE_GRAD: the calls, and how often parameters are gathered.

    Two stages of four blocks: gathered once each, and the first again after it was let go.
    """
    over, replica = mesh_and_replica()
    schedule = Schedule.from_csv(by_hand(TORCH).to_csv())
    pipe = build(wrap, schedule, executor, over, num_microbatches=None)
    reference = Reference(pipe)
    gather = mock.Mock(wraps=_fsdp_param_group.foreach_all_gather)
    with (
        mock.patch.object(_fsdp_param_group, "foreach_all_gather", gather),
        recorded(Sharded if wrap == "fsdp" else Replicated) as calls,
    ):
        step(pipe, 0, replica)
    reference.step(0)
    assert not (wrong := wrong_gradients(pipe, reference)), wrong
    assert calls == [action for action in TORCH.split() if action[1] not in "FIW"] + ["0REDUCE_GRAD"]
    assert gather.call_count == gathered


def shard_in_bf16(module: nn.Module, over: DeviceMesh) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    for block in module.children():
        fully_shard(block, mesh=over, mp_policy=policy)
    return fully_shard(module, mesh=over, mp_policy=policy)


def in_bf16(order: str, executor: str, folds: bool) -> list[torch.Tensor]:
    over = mesh()
    pipe = build(shard_in_bf16, by_hand(order), executor, over, num_microbatches=None)
    fold, count = Sharded.fold, itertools.count()
    # every other time: then two microbatches' are added before
    Sharded.fold = fold if folds else lambda self: next(count) % 2 and fold(self)
    try:
        step(pipe, 0, over.get_local_rank("dp"))
    finally:
        Sharded.fold = fold
    return [p.grad.full_tensor() for p in pipe.parameters() if p.grad is not None]


def test_microbatches_are_added_in_the_dtype_of_the_reduction(executor: str, group_of: GroupOf) -> None:
    """Split or whole, a microbatch's gradient in bf16 is added in fp32; a sum of two in bf16 would be another."""
    group = group_of(2)
    whole, split, unfolded = (
        group.run(in_bf16, order, executor, folds)[0] for order, folds in ((WHOLE, True), (SPLIT, True), (SPLIT, False))
    )
    assert len(whole) == 31 and all(map(same_bits, whole, split))
    assert not all(map(same_bits, whole, unfolded))


def sums_over(factor: float | None, over: DeviceMesh) -> list[torch.Tensor]:
    """The gradients of stages whose sums over the replicas are divided by a factor; None: by their number."""

    def wrap(module: nn.Module, over: DeviceMesh) -> nn.Module:
        sharded = fully_shard(module, mesh=over)
        if factor is not None:
            sharded.set_gradient_divide_factor(factor)
        return sharded

    pipe = build(wrap, by_hand(SPLIT), "auto", over, num_microbatches=None)
    step(pipe, 0, over.get_local_rank("dp"))
    return [p.grad.full_tensor() for p in pipe.parameters() if p.grad is not None]


@on_ranks(2)
def test_the_divisor_of_shards_also_over_gloo() -> None:
    """Where torch asks for a multiplication within the sum, which Gloo does not have."""
    over = mesh()
    means, quarters = sums_over(None, over), sums_over(4.0, over)
    assert means and all(same_bits(mean, 2 * quarter) for mean, quarter in zip(means, quarters, strict=True))


def fsdp1(module: nn.Module, over: DeviceMesh) -> nn.Module:
    """Its constructor wants an accelerator; what is refused is the class."""
    made = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(made)
    made._modules["_fsdp_wrapped_module"] = module
    made.training_state = None
    return made


@on_ranks(2)
def test_what_is_not_known_is_refused_by_name() -> None:
    over = mesh()
    group = over["dp"].get_group()

    def ddp(module: nn.Module, **flags: Any) -> nn.Module:
        return DistributedDataParallel(module, process_group=group, **flags)

    def both(module: nn.Module, over: DeviceMesh) -> nn.Module:
        inner = nn.Sequential(shard(nn.Sequential(*module.children()), over))
        inner.add_module("more", ddp(nn.Linear(WIDTH, WIDTH)))
        return inner

    def sparse(module: nn.Module, over: DeviceMesh) -> nn.Module:
        return ddp(nn.ModuleList([module, nn.Embedding(3, 3, sparse=True)]))

    def without_parameters(module: nn.Module, over: DeviceMesh) -> nn.Module:
        return fully_shard(nn.ReLU(), mesh=over["dp"])

    def composable(module: nn.Module, over: DeviceMesh) -> nn.Module:
        return replicate(module, process_group=group)

    def in_groups(module: nn.Module, over: DeviceMesh) -> nn.Module:
        fully_shard(list(module.children()), mesh=over["dp"])
        return module

    for wrap, text in (
        (without_parameters, "stage 0 has fully_shard and no parameters"),
        (in_groups, r"stages: in stage \d, fully_shard has \['Block', .*\] as one group"),
        (composable, "stage 0 is wrapped in composable replicate"),
        (fsdp1, "stage 0 is wrapped in FullyShardedDataParallel"),
        (both, "stage 0 has DistributedDataParallel and fully_shard in it"),
        (sparse, "of stage 0 has a sparse embedding"),
    ):
        with pytest.raises(ValueError, match=text):
            build(wrap, "1f1b", "auto", over)
    blocks = [Block() for _ in range(4)]
    replicas = over["dp"]
    for stages, options, text in (
        (blocks, {"num_ranks": 2, "data_parallel": replicas}, "the ranks are threads of this process.*torchrun"),
        (blocks, {"data_parallel": over}, "data_parallel: the DeviceMesh has 2 dimensions"),
        (blocks, {"data_parallel": 3}, "data_parallel is a int: give a process group"),
        ({0: ddp(nn.Sequential(*blocks))}, {"data_parallel": replicas}, "data_parallel: stage 0 is already wrapped"),
    ):
        with pytest.raises((TypeError, ValueError), match=text):
            Pipeline(stages, "1f1b", 4, squared, group=over["pp"], **options)
