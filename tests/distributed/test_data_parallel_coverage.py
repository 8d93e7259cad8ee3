"""Layers that no wrapper knows of, and models that were sharded before or after they were split."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fastpipe
from fastpipe import Pipeline
from tests.distributed.meshes import Reference, layers, mesh, squared, wrong_gradients
from tests.distributed.ranks import GroupOf
from tests.distributed.test_data_parallel_wrappers import refusal, step
from tests.runtime.decoders import LAYERS, decoder, padded_batch
from tests.runtime.test_split import Decoder
from tests.runtime.test_split import batch as text


def some_layers(wrap: str, schedule: str) -> dict[str, Any]:
    over = mesh()

    def wrapped(module: nn.Module) -> nn.Module:
        if wrap == "ddp":
            return DistributedDataParallel(module, process_group=over["dp"].get_group())
        return fully_shard(module, mesh=over["dp"])

    def build(bare: list[int], **options: Any) -> Pipeline:
        made = [layer if i in bare else wrapped(layer) for i, layer in enumerate(layers())]
        return Pipeline(made, schedule, 5, squared, group=over["pp"], **options)

    found = {"some": refusal(lambda: build([1, 5]))}
    pipe = build([])
    replica = over.get_local_rank("dp")
    step(pipe, 0, replica)
    reference = Reference(pipe)
    reference.step(0)
    found["wrong"] = (
        [name.replace("module.", "") for name in wrong_gradients(pipe, reference)] if wrap == "fsdp" else []
    )
    pipe.stage_modules[pipe.rank].add_module("late", nn.Linear(2, 2))
    found["late"] = refusal(lambda: step(pipe, 1, replica))
    return found


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_a_stage_of_which_only_some_layers_are_wrapped_is_refused(wrap: str, group_of: GroupOf) -> None:
    """Also when a layer is appended later."""
    for rank, found in enumerate(group_of(4).run(some_layers, wrap, "1f1b")):
        names = ("1.norm.weight", "5.norm.weight")[rank % 2]
        assert f"but not its {names}" in found["some"] and "would not be averaged over the replicas" in found["some"]
        assert "but not its late.weight, late.bias" in found["late"] and not found["wrong"]


def shard_parts(model: Any, over: DeviceMesh) -> None:
    for part in (model.model.embed_tokens, *model.model.layers, model.model.norm, model.lm_head):
        fully_shard(part, mesh=over["dp"])


def sharded_models(way: str) -> None:
    """The gradients of replicas with the same batch are those of the unsplit model."""
    over = mesh()
    model = decoder("llama", tied=False)
    if way == "before":
        shard_parts(model, over)
    layers = fastpipe.split(model)

    def stage(index: int) -> nn.Module:
        half = LAYERS // 2
        made = layers.chain(range(half * index, half * index + half))
        for block in made.model.layers.children():
            fully_shard(block, mesh=over["dp"])
        return fully_shard(made, mesh=over["dp"])

    options: dict[str, Any] = {"group": over["pp"], "loss_reduction": layers.num_tokens}
    pipe = Pipeline(layers if way == "before" else stage, "1f1b", 2, layers.loss_fn, **options)
    ids, mask, labels = padded_batch(4)
    parity = fastpipe.check_parity(pipe, decoder("llama", tied=False), (ids, labels), kwargs={"attention_mask": mask})
    assert parity.ok, parity
    pipe.step(ids, attention_mask=mask, target=labels)
    unsplit = decoder("llama", tied=False)
    unsplit(ids, attention_mask=mask, labels=labels).loss.backward()
    expected = dict(unsplit.named_parameters())
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), expected[name].grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("way", ["before", "stages"])
def test_sharded_before_the_split_and_by_stage(way: str, group_of: GroupOf) -> None:
    group_of(4).run(sharded_models, way)


def refused_models() -> dict[str, str]:
    over = mesh()["dp"]
    found = {}
    for name, model in {"hf": decoder("llama"), "plain": Decoder(), "list": nn.Sequential(*layers())}.items():
        fully_shard(model, mesh=over)
        found[name] = refusal(lambda model=model: fastpipe.split(model, text()[0]))
    ddp = DistributedDataParallel(Decoder(), process_group=over.get_group())
    found["ddp"] = refusal(lambda: fastpipe.split(ddp, text()[0]))
    split = fastpipe.split(decoder("llama"))
    for layer in split:
        fully_shard(layer, mesh=over)
    options: dict[str, Any] = {"group": mesh()["pp"]}
    found["layers"] = refusal(lambda: Pipeline(split, "1f1b", 2, split.loss_fn, **options))
    return found


def test_models_that_were_wrapped_as_a_whole_are_refused(group_of: GroupOf) -> None:
    for found in group_of(4).run(refused_models):
        for name in ("hf", "plain", "list"):
            assert "fully_shard was applied to FSDP" in found[name] and "to every block, to the norm" in found[name]
        assert "model is in DistributedDataParallel" in found["ddp"] and "data_parallel=" in found["ddp"]
        assert "has hooks, those of fully_shard for example" in found["layers"]
