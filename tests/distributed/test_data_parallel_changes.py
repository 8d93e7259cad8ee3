"""Layers that are unfrozen, exchanged or appended when their stages have replicas already."""

import gc
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from fastpipe import Pipeline, StepError
from tests.conftest import executors_in_turn
from tests.distributed.meshes import (
    LAYERS,
    WIDTH,
    WRAPS,
    Block,
    Reference,
    build,
    mesh_and_replica,
    squared,
    step,
    wrong_gradients,
)
from tests.distributed.ranks import GroupOf, on_ranks
from tests.distributed.test_tied_data_parallel import batch as text_batch
from tests.runtime.checks import same_bits
from tests.runtime.test_tied import loss_fn, tied_layers

Layers = Sequence[nn.Module]


def layers() -> list[nn.Module]:
    """The first four are frozen, so with any schedule whole stages are, and a layer of a stage that is trained."""
    torch.manual_seed(0)
    made = [nn.Sequential(Block()) for _ in range(LAYERS)]
    for layer in made[:4]:
        layer.requires_grad_(False)
    made[6][0].linear.requires_grad_(False)
    return list(made)


def unfreeze(model: Layers, replica: int) -> None:
    model[6][0].linear.requires_grad_(True)


def unfreeze_a_stage(model: Layers, replica: int) -> None:
    for layer in model[:4]:
        layer.requires_grad_(True)


def exchange(model: Layers, replica: int) -> None:
    """Other values in each replica: the first one's count."""
    torch.manual_seed(10 + replica)
    model[5][0].linear = nn.Linear(WIDTH, WIDTH)


def append(model: Layers, replica: int) -> None:
    """With buffers; what the reference's first model has as well."""
    torch.manual_seed(20 + replica)
    for index in (2, 7):
        model[index].append(nn.Linear(WIDTH, WIDTH))


def parametrize(model: Layers, replica: int) -> None:
    """A Parameter goes, and two others come in its place."""
    nn.utils.parametrizations.weight_norm(model[4][0].linear)


CHANGES = [unfreeze, unfreeze_a_stage, exchange, append, parametrize]


def pipeline(whole: Layers, schedule: str, executor: str, over: DeviceMesh, **more: Any) -> Pipeline:
    options = {"group": over["pp"], "data_parallel": over["dp"], "executor": executor}
    return Pipeline(list(whole), schedule, 5, squared, **options, **more)


def clear(pipe: Pipeline, reference: Reference) -> None:
    for parameter in itertools.chain(pipe.parameters(), *(model.parameters() for model in reference.models)):
        parameter.grad = None


def same_gradients(modules: Sequence[nn.Module], group: Any) -> int:
    """How many parameters to train there are; every process of the group has the same gradients of them."""
    trained = [p for module in modules for p in module.parameters() if p.requires_grad]
    for parameter in trained:
        assert parameter.grad is not None
        grads = [torch.empty_like(parameter) for _ in range(group.size())]
        dist.all_gather(grads, parameter.grad, group=group)
        assert all(same_bits(grad, parameter.grad) for grad in grads)
    return len(trained)


@executors_in_turn("schedule", ["zbv", "1f1b"])
@on_ranks(4)
def test_replicas_reduce_what_is_to_be_trained_now(schedule: str, executor: str) -> None:
    """After every change a step, and another that adds to it; two more of which the first reduces nothing."""
    over, replica = mesh_and_replica()
    whole = layers()
    pipe = pipeline(whole, schedule, executor, over)
    reference = Reference(pipe, layers)
    for number, change in enumerate([lambda model, replica: None, *CHANGES]):
        change(whole, replica)
        for model in reference.models:
            change(list(model.children()), 0)
        clear(pipe, reference)
        for more in range(2):
            step(pipe, 4 * number + more, replica)
            reference.step(4 * number + more)
            assert wrong_gradients(pipe, reference) == [], change
        if change is unfreeze:
            weight = whole[6][0].linear.weight
            holders = [stage for stage in pipe._steps.stages if any(p is weight for p in stage.module.parameters())]
            assert all(stage.waits(weight) is (schedule == "zbv") for stage in holders), "what W computes is not known"
        with pipe.no_sync():
            step(pipe, 4 * number + 2, replica)
        step(pipe, 4 * number + 3, replica)
        reference.step(4 * number + 2, reduces=False)
        reference.step(4 * number + 3)
        assert wrong_gradients(pipe, reference) == [], change
    assert all(p.requires_grad and p.grad is not None for p in pipe.parameters())


def outcome(call: Callable[[], Any]) -> str:
    try:
        call()
    except (ValueError, StepError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def errors() -> list[Any]:
    return [kept for kept in gc.get_objects() if isinstance(kept, (ValueError, StepError))]


def change_one(executor: str) -> dict[str, str]:
    """In one replica, or in both and not alike; then alike."""
    over, replica = mesh_and_replica()
    whole = layers()
    # with buffers, of which one replica has more when it has changed
    for index in (0, 7):
        whole[index].append(nn.BatchNorm1d(WIDTH))
    pipe = pipeline(whole, "1f1b", executor, over)
    found = {}
    if replica == 0:
        whole[7].append(nn.BatchNorm1d(WIDTH))
    gc.collect()
    gc.disable()
    before = errors()  # modules of other tests have some
    found["one"] = outcome(lambda: step(pipe, 0, replica))
    found["in cycles"] = ", ".join(str(kept) for kept in errors() if all(kept is not one for one in before))
    gc.enable()
    if replica == 1:
        whole[7].append(nn.Linear(WIDTH, WIDTH))
    found["not alike"] = outcome(lambda: step(pipe, 0, replica))
    whole[7][2] = nn.Linear(WIDTH, WIDTH)
    found["alike"] = outcome(lambda: step(pipe, 0, replica))
    same_gradients(list(pipe.stage_modules.values()), over["dp"].get_group())
    return found


def test_replicas_that_do_not_change_alike_are_told_and_go_on(executor: str, group_of: GroupOf) -> None:
    answers = group_of(4).run(change_one, executor)
    assert all(answer["alike"] == "" for answer in answers)
    assert all(answer["in cycles"] == "" for answer in answers), answers
    for answer in answers[:2]:
        assert "1 of 2 replicas of stage 1 " in answer["one"]
        assert "7.2.weight, 7.2.bias; unfreeze, replace or append" in answer["one"]
    assert answers[1]["one"].startswith("ValueError") and answers[0]["one"].startswith("StepError: rank 1 refused")
    for answer in answers[2:]:
        assert (
            answer["one"].startswith("StepError") and "1 of 2 replicas have new trainable parameters" in answer["one"]
        )
    for answer in answers:
        assert "the replicas of stage 1 do not have the same new parameters" in answer["not alike"]


@on_ranks(4)
def test_what_no_sync_added_for_other_values_is_refused(executor: str) -> None:
    """A layer that is another one in each replica until the first step that reduces: what is added before is wrong."""
    over, replica = mesh_and_replica()
    whole = layers()
    pipe = pipeline(whole, "zbv", executor, over)
    exchange(whole, replica)
    with pipe.no_sync():
        step(pipe, 0, replica)
    message = outcome(lambda: step(pipe, 1, replica))
    assert "no_sync" in message and "of stage 2 that are new, 5.0.linear.bias" in message
    reference = Reference(pipe, layers)
    for model in reference.models:
        exchange(list(model.children()), 0)
    clear(pipe, reference)
    with pipe.no_sync():
        step(pipe, 0, replica)
    step(pipe, 1, replica)
    reference.step(0, reduces=False)
    reference.step(1)
    assert wrong_gradients(pipe, reference) == []


@on_ranks(4)
def test_a_tied_weight_is_unfrozen(executor: str) -> None:
    """An embedding that the output shares, in bf16 with fp32 gradients: as in a pipeline built anew."""
    over, replica = mesh_and_replica()
    options = {"group": over["pp"], "data_parallel": over["dp"], "executor": executor, "grad_dtype": torch.float32}
    frozen, trained = ([layer.bfloat16() for layer in tied_layers()] for _ in range(2))
    frozen[0].requires_grad_(False)
    pipe = Pipeline(frozen, "zbv", 4, loss_fn, **options)
    text, target = text_batch(0, replica)
    pipe.step(text, target=target)
    for layers in (frozen, trained):
        layers[0].requires_grad_(True)
        torch.manual_seed(1)
        layers[2].linear = nn.Linear(*layers[2].linear.weight.shape, dtype=torch.bfloat16)
    for parameter in pipe.parameters():
        parameter.grad = None
    anew = Pipeline(trained, "zbv", 4, loss_fn, **options)
    for made in (pipe, anew):
        made.step(text, target=target)
    expected = dict(anew.named_parameters())
    for name, parameter in pipe.named_parameters():
        assert parameter.grad is not None and parameter.grad.dtype == torch.float32, name
        assert same_bits(parameter.grad, expected[name].grad), name


@on_ranks(2)
def test_a_stage_that_was_wrapped_by_hand(executor: str) -> None:
    over, replica = mesh_and_replica()
    group = over["dp"].get_group()
    whole = layers()

    def wrap(module: nn.Module, over: DeviceMesh, hooked: bool = False) -> nn.Module:
        module._ddp_params_and_buffers_to_ignore = ["6.0.linear.weight"]
        wrapped = DistributedDataParallel(module, process_group=group, bucket_cap_mb=0.0001, static_graph=True)
        if hooked:
            wrapped.register_comm_hook(group, allreduce_hook)
        return wrapped

    def changed(hooked: bool = False) -> Pipeline:
        nonlocal whole
        whole = layers()[:4]
        whole[0].requires_grad_(True)
        pipe = build(lambda *args: wrap(*args, hooked), "1f1b", executor, over, made=lambda: whole)
        whole[1].append(nn.Linear(WIDTH, WIDTH))
        return pipe

    step(changed(), 0, replica)
    assert same_gradients([whole[1]], group) == 2
    refused = outcome(lambda: step(changed(hooked=True), 0, replica))
    assert all(text in refused for text in ("1.1.weight, 1.1.bias", "communication hook", "build a new Pipeline"))


@on_ranks(2)
def test_what_cannot_be_mended_is_refused() -> None:
    over, replica = mesh_and_replica()
    bare = nn.Sequential(nn.Tanh())
    pipe = pipeline([nn.Linear(WIDTH, WIDTH), bare], "1f1b", "auto", over, partition=[2])
    step(pipe, 0, replica)
    alone = pipeline([bare], "1f1b", "auto", over)
    bare.append(nn.Linear(WIDTH, WIDTH))
    text = outcome(lambda: step(alone, 0, replica))
    assert "stage 0 had no parameters" in text and "0.1.weight, 0.1.bias" in text
    bare[1] = nn.LazyLinear(WIDTH)
    text = outcome(lambda: step(pipe, 0, replica))
    assert "1.1.weight, 1.1.bias, some have no shape yet; run a forward" in text


def beside_others(executor: str) -> str:
    """Where every stage is held twice, and where another stage of the rank is sharded: new layers are refused there."""
    over, replica = mesh_and_replica()
    whole = layers()
    pipe = Pipeline(whole, "dualpipe", 6, squared, group=over["pp"], data_parallel=over["dp"], executor=executor)
    for number, change in enumerate((unfreeze, unfreeze_a_stage)):
        change(whole, replica)
        step(pipe, number, replica)
    assert same_gradients(list(pipe.stage_modules.values()), dist.group.WORLD) == 4 * LAYERS

    def wrap(module: nn.Module, over: DeviceMesh) -> nn.Module:
        return WRAPS["fsdp" if "2" in dict(module.named_children()) else "ddp"](module, over)

    whole = layers()
    unfreeze_a_stage(whole, replica)
    pipe = build(wrap, "interleaved_1f1b", executor, over, made=lambda: whole)
    unfreeze(whole, replica)
    step(pipe, 0, replica)
    own = [module for module in pipe.stage_modules.values() if isinstance(module, DistributedDataParallel)]
    assert same_gradients(own, over["dp"].get_group())
    whole[2][0].requires_grad_(False)
    whole[2][0].requires_grad_(True)
    step(pipe, 1, replica)
    append(whole, replica)
    return outcome(lambda: step(pipe, 0, replica))


def test_changes_beside_holders_and_shards(executor: str, group_of: GroupOf) -> None:
    even, odd, *_ = group_of(4).run(beside_others, executor)
    assert odd.startswith("ValueError: stages: stage 1 has trainable parameters")
    assert "weight of a Linear, bias of a Linear, which fully_shard" in odd
    assert even.startswith("StepError: rank 1 refused its input: ValueError: stages: stage 1")
