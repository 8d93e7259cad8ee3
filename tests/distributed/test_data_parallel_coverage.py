"""Layers that no wrapper knows of, and models that were sharded before or after they were split."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fastpipe
from fastpipe import Pipeline
from tests.distributed.meshes import Reference, layers, mesh, mesh_and_replica, squared, step, wrong_gradients
from tests.distributed.ranks import on_ranks
from tests.runtime.decoders import LAYERS, decoder, padded_batch
from tests.runtime.test_split import Decoder
from tests.runtime.test_split import batch as text


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(ValueError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
@on_ranks(4)
def test_a_stage_of_which_only_some_layers_are_wrapped_is_refused(wrap: str) -> None:
    """Also when a layer is appended later."""
    over, replica = mesh_and_replica()

    def wrapped(module: nn.Module) -> nn.Module:
        if wrap == "ddp":
            return DistributedDataParallel(module, process_group=over["dp"].get_group())
        return fully_shard(module, mesh=over["dp"])

    def build(bare: list[int]) -> Pipeline:
        made = [layer if i in bare else wrapped(layer) for i, layer in enumerate(layers())]
        return Pipeline(made, "1f1b", 5, squared, group=over["pp"])

    text = refusal(lambda: build([1, 5]))
    assert f"but not its {1 + 4 * over.get_local_rank('pp')}.norm.weight" in text
    assert "would not be averaged over the replicas" in text
    pipe = build([])
    step(pipe, 0, replica)
    reference = Reference(pipe)
    reference.step(0)
    assert wrap == "ddp" or wrong_gradients(pipe, reference) == []
    pipe.stage_modules[pipe.rank].add_module("late", nn.Linear(2, 2))
    assert "but not its late.weight, late.bias" in refusal(lambda: step(pipe, 1, replica))


@pytest.mark.parametrize("way", ["ddp", "fsdp", "data_parallel", "data_parallel, one pipeline"])
@on_ranks(4)
def test_an_average_with_other_ranks_of_the_pipeline_is_refused(way: str) -> None:
    """Wrappers average over all processes by default: stages of equal shapes would get each other's weights."""
    over = mesh_and_replica()[0]
    wrap = {"ddp": DistributedDataParallel, "fsdp": fully_shard}.get(way, lambda layer: layer)
    given = {"group": None if "one" in way else over["pp"], "data_parallel": over["dp" if "one" in way else "pp"]}
    if way in ("ddp", "fsdp"):
        del given["data_parallel"]
    text = refusal(lambda: Pipeline([wrap(layer) for layer in layers()], "1f1b", 5, squared, **given))
    assert "averages over the processes [" in text
    assert "are other ranks of this pipeline" in text


@on_ranks(4)
def test_an_average_with_another_rank_of_another_pipeline_is_refused() -> None:
    over = mesh_and_replica()[0]
    groups = [dist.new_group(ranks) for ranks in ([0, 3], [1, 2])]
    crossed = groups[dist.get_rank() in (1, 2)]
    equal = [nn.Linear(4, 4) for _ in range(4)]  # others differ in shape, which DistributedDataParallel refuses
    # a StepError where the ValueError of another process comes before the own comparison has ended
    with pytest.raises((ValueError, fastpipe.StepError), match="or are other stages there"):
        Pipeline(equal, "1f1b", 5, squared, group=over["pp"], data_parallel=crossed)


def shard_parts(model: Any, over: DeviceMesh) -> None:
    for part in (model.model.embed_tokens, *model.model.layers, model.model.norm, model.lm_head):
        fully_shard(part, mesh=over["dp"])


@pytest.mark.parametrize("way", ["before", "stages"])
@on_ranks(4)
def test_sharded_before_the_split_and_by_stage(way: str) -> None:
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


@on_ranks(4)
def test_models_that_were_wrapped_as_a_whole_are_refused() -> None:
    over = mesh()["dp"]
    for model in (decoder("llama"), Decoder(), nn.Sequential(*layers())):
        fully_shard(model, mesh=over)
        told = refusal(lambda model=model: fastpipe.split(model, text()[0]))
        assert "fully_shard was applied to FSDP" in told and "to every block, to the norm" in told, told
    ddp = DistributedDataParallel(Decoder(), process_group=over.get_group())
    told = refusal(lambda: fastpipe.split(ddp, text()[0]))
    assert "model is in DistributedDataParallel" in told and "data_parallel=" in told
    split = fastpipe.split(decoder("llama"))
    for layer in split:
        fully_shard(layer, mesh=over)
    told = refusal(lambda: Pipeline(split, "1f1b", 2, split.loss_fn, group=mesh()["pp"]))
    assert "has hooks, those of fully_shard for example" in told
