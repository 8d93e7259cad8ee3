"""Stages on the meta device, each process with the memory of its own stages only."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fastpipe
from fastpipe import Pipeline
from tests.distributed.meshes import whole_grad
from tests.distributed.ranks import GroupOf, on_ranks
from tests.distributed.test_step import caught, refuses
from tests.runtime.checks import same_bits
from tests.runtime.decoders import assert_like, decoder
from tests.runtime.meta_models import (
    COUNT,
    WIDTH,
    Rotated,
    assert_trains_like,
    batch,
    initialise_stages,
    layers,
    loss_fn,
    num_bytes,
    on_meta,
    step,
    whole_model,
)


def sgd(pipe: Pipeline) -> torch.optim.Optimizer:
    return torch.optim.SGD(pipe.parameters(), lr=0.1)


@pytest.mark.parametrize("schedule", ["zbv", "dualpipe"])
@on_ranks(2)
def test_initialised_stages_train_like_the_unsplit_model(schedule: str, executor: str) -> None:
    made = on_meta()
    pipe = Pipeline(made, schedule, COUNT, loss_fn, partition="parameters", executor=executor)
    optimizer = sgd(pipe)
    with pytest.raises(ValueError, match="on the meta device"):
        step(pipe, batch())
    pipe.to_empty()
    initialise_stages(pipe)
    assert_trains_like(pipe, whole_model(), optimizer)
    own = {id(parameter) for parameter in pipe.parameters()}
    others = [parameter for layer in made for parameter in layer.parameters() if id(parameter) not in own]
    assert all(parameter.is_meta for parameter in others)
    held = num_bytes(made)
    assert held == num_bytes(pipe.stage_modules.values())
    assert held < num_bytes([whole_model()]) or schedule == "dualpipe"


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipev"])
@on_ranks(2)
def test_loaded_stages_train_like_the_unsplit_model(schedule: str, tmp_path: Path) -> None:
    whole = whole_model()
    fastpipe.save_checkpoint(tmp_path / "saved", Pipeline(whole_model(), "1f1b", COUNT, loss_fn))
    made = on_meta()
    pipe = Pipeline(made, schedule, COUNT, loss_fn)
    fastpipe.load_checkpoint(tmp_path / "saved", pipe)
    for module in (module for stage in pipe.stage_modules.values() for module in stage.modules()):
        if isinstance(module, Rotated):
            module.compute_angles()
    assert_trains_like(pipe, whole, sgd(pipe))
    assert num_bytes(made) < num_bytes([whole_model()])


@on_ranks(2)
def test_one_rank_on_meta() -> None:
    """Only the second rank builds on meta, and it initialises only later, and too little."""
    rank = dist.get_rank()
    made = on_meta(lambda: layers(tied=False)) if rank else list(whole_model(tied=False))
    pipe = Pipeline(made, "1f1b", COUNT, loss_fn)
    refuses(lambda: step(pipe, batch()), "on the meta device", on=1)
    pipe.to_empty()
    refuses(lambda: step(pipe, batch()), "have no values", on=1)
    if rank:
        initialise_stages(pipe)
    assert_trains_like(pipe, whole_model(tied=False), sgd(pipe))
    said = "stage 1 is on the meta device.*fully_shard" if rank else "stage 0 is"
    with pytest.raises(ValueError, match=f"data_parallel: {said}"):
        Pipeline(on_meta(), "1f1b", COUNT, loss_fn, data_parallel=dist.group.WORLD)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def spread(kind: str, mesh: Any, on: str) -> list[nn.Module]:
    torch.manual_seed(0)
    with torch.device(on):
        made = [Mlp() for _ in range(4)]
    for layer in made:
        if kind == "tp":
            parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        else:
            fully_shard(layer, mesh=mesh["dp"])
    return made


@pytest.mark.parametrize(("kind", "schedule"), [("dp", "1f1b"), ("tp", "zbv")])
@on_ranks(4)
def test_sharded_and_spread_stages(kind: str, schedule: str, tmp_path: Path) -> None:
    """A checkpoint of layers with values, loaded into layers on meta; then the same by assignment."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", kind))
    options: Any = {"mesh": mesh} if kind == "tp" else {"group": mesh["pp"]}
    options |= {"num_microbatches": 4, "loss_fn": nn.functional.mse_loss, "schedule": schedule}
    ready = Pipeline(spread(kind, mesh, "cpu"), **options)
    fastpipe.save_checkpoint(tmp_path / "saved", ready)
    generator = torch.Generator().manual_seed(dist.get_rank() % 2 if kind == "dp" else 0)
    x, y = torch.randn(2, 9, 3, WIDTH, generator=generator)
    expected = ready.step(x, target=y)
    for how in ("load", "assign"):
        made = spread(kind, mesh, "meta")
        pipe = Pipeline(made, **options)
        if how == "load":
            fastpipe.load_checkpoint(tmp_path / "saved", pipe)
        else:
            pipe.load_state_dict(ready.state_dict(), assign=True)
        assert same_bits(pipe.step(x, target=y).loss, expected.loss)
        pairs = list(zip(pipe.named_parameters(), ready.named_parameters(), strict=True))
        assert len(pairs) == 12
        for (name, found), (_, parameter) in pairs:
            assert isinstance(found, DTensor) == isinstance(parameter, DTensor) and not found.is_meta
            grads = whole_grad(found), whole_grad(parameter)
            assert grads[0] is not None and grads[1] is not None and same_bits(*grads), name
        own = {id(parameter) for parameter in pipe.parameters()}
        assert all(p.is_meta for layer in made for p in layer.parameters() if id(p) not in own)


def from_files(kind: str, folder: str) -> int:
    """A step of a model of which every process reads its part."""
    config = transformers.AutoConfig.from_pretrained(folder)
    config.use_cache = False
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config).train()
    layers = fastpipe.split(model)
    options = {"loss_reduction": layers.num_tokens}
    pipe = Pipeline(layers, "zbv" if kind == "gpt2" else "1f1b", 4, layers.loss_fn, **options)
    fastpipe.load_safetensors(folder, pipe)
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, config=config).train()
    assert_like(pipe, whole, 9)
    assert num_bytes([model]) == num_bytes(pipe.stage_modules.values())
    return num_bytes([model])


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_files_of_hugging_face(kind: str, group_of: GroupOf, tmp_path: Path) -> None:
    model = decoder(kind)
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    held = group_of(2).run(from_files, kind, str(tmp_path))
    assert max(held) < num_bytes([model])


def missing_files(folder: str) -> Any:
    with torch.device("meta"):
        model = decoder("llama")
    layers = fastpipe.split(model)
    pipe = Pipeline(layers, "1f1b", 4, layers.loss_fn, loss_reduction=layers.num_tokens)
    with contextlib.chdir(folder) if dist.get_rank() else contextlib.nullcontext():
        return caught(lambda: fastpipe.load_safetensors("files", pipe))


def test_files_that_one_rank_lacks(group_of: GroupOf, tmp_path: Path) -> None:
    decoder("llama").save_pretrained(tmp_path / "files")
    zero, one = group_of(2).run(missing_files, str(tmp_path))
    assert zero[0] == "FileNotFoundError" and "'files' does not exist" in zero[1]
    assert one[0] in ("StepError", "ValueError")
