"""Stages on the meta device, each process with the memory of its own stages only."""

import json
from collections.abc import Callable
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
from fastpipe.testing import reference_step
from tests.distributed.meshes import whole_grad
from tests.distributed.ranks import Ranks
from tests.distributed.test_step import caught
from tests.runtime.checks import assert_same, same_bits
from tests.runtime.decoders import decoder, padded_batch
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

GroupOf = Callable[[int], Ranks]


def sgd(pipe: Pipeline) -> torch.optim.Optimizer:
    return torch.optim.SGD(pipe.parameters(), lr=0.1)


def initialised(schedule: str, executor: str) -> dict[str, int]:
    made = on_meta()
    pipe = Pipeline(made, schedule, COUNT, loss_fn, partition="parameters", executor=executor)
    optimizer = sgd(pipe)
    first = caught(lambda: step(pipe, batch()))
    pipe.to_empty()
    initialise_stages(pipe)
    assert_trains_like(pipe, whole_model(), optimizer)
    own = {id(parameter) for parameter in pipe.parameters()}
    others = [parameter for layer in made for parameter in layer.parameters() if id(parameter) not in own]
    assert all(parameter.is_meta for parameter in others)
    return {"held": num_bytes(made), "own": num_bytes(pipe.stage_modules.values()), "first": first}  # type: ignore[dict-item]


@pytest.mark.parametrize("schedule", ["zbv", "dualpipe"])
def test_initialised_stages_train_like_the_unsplit_model(schedule: str, executor: str, group_of: GroupOf) -> None:
    zero, one = group_of(2).run(initialised, schedule, executor)
    whole = num_bytes([whole_model()])
    for answer in (zero, one):
        assert answer["held"] == answer["own"] and (answer["own"] < whole or schedule == "dualpipe")
        assert answer["first"][0] == "ValueError" and "on the meta device" in answer["first"][1]


def loaded(schedule: str, folder: str, saves: bool) -> int:
    whole = whole_model()
    if saves:
        fastpipe.save_checkpoint(folder, Pipeline(whole_model(), "1f1b", COUNT, loss_fn))
    made = on_meta()
    pipe = Pipeline(made, schedule, COUNT, loss_fn)
    fastpipe.load_checkpoint(folder, pipe)
    for module in (module for stage in pipe.stage_modules.values() for module in stage.modules()):
        if isinstance(module, Rotated):
            module.compute_angles()
    assert_trains_like(pipe, whole, sgd(pipe))
    return num_bytes(made)


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipev"])
def test_loaded_stages_train_like_the_unsplit_model(schedule: str, group_of: GroupOf, tmp_path: Path) -> None:
    held = group_of(2).run(loaded, schedule, str(tmp_path / "saved"), True)
    assert max(held) < num_bytes([whole_model()])


def one_of_two() -> dict[str, Any]:
    """Only the second rank builds on meta, and it initialises only later, and too little."""
    rank = dist.get_rank()
    made = on_meta(lambda: layers(tied=False)) if rank else list(whole_model(tied=False))
    pipe = Pipeline(made, "1f1b", COUNT, loss_fn)
    answers: dict[str, Any] = {"before": caught(lambda: step(pipe, batch()))}
    pipe.to_empty()
    answers["empty"] = caught(lambda: step(pipe, batch()))
    if rank:
        initialise_stages(pipe)
    assert_trains_like(pipe, whole_model(tied=False), sgd(pipe))
    answers["data_parallel"] = caught(
        lambda: Pipeline(on_meta(), "1f1b", COUNT, loss_fn, data_parallel=dist.group.WORLD)
    )
    return answers


def test_one_rank_on_meta(group_of: GroupOf) -> None:
    zero, one = group_of(2).run(one_of_two)
    assert one["before"][0] == one["empty"][0] == one["data_parallel"][0] == "ValueError"
    assert zero["before"][0] == zero["empty"][0] == "StepError"
    assert "rank 1" in zero["before"][1] and "on the meta device" in zero["before"][1]
    assert "have no values" in zero["empty"][1]
    assert "data_parallel: stage 0 is" in zero["data_parallel"][1]
    assert "data_parallel: stage 1 is on the meta device" in one["data_parallel"][1]
    assert "fully_shard" in one["data_parallel"][1]


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


def over_a_mesh(kind: str, schedule: str, folder: str) -> int:
    """Four ranks: a checkpoint of layers with values, loaded into layers on meta; then the same by assignment."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", kind))
    options: Any = {"mesh": mesh} if kind == "tp" else {"group": mesh["pp"]}
    options |= {"num_microbatches": 4, "loss_fn": nn.functional.mse_loss, "schedule": schedule}
    ready = Pipeline(spread(kind, mesh, "cpu"), **options)
    fastpipe.save_checkpoint(folder, ready)
    generator = torch.Generator().manual_seed(dist.get_rank() % 2 if kind == "dp" else 0)
    x, y = torch.randn(2, 9, 3, WIDTH, generator=generator)
    expected = ready.step(x, target=y)
    count = 0
    for how in ("load", "assign"):
        made = spread(kind, mesh, "meta")
        pipe = Pipeline(made, **options)
        if how == "load":
            fastpipe.load_checkpoint(folder, pipe)
        else:
            pipe.load_state_dict(ready.state_dict(), assign=True)
        assert same_bits(pipe.step(x, target=y).loss, expected.loss)
        for (name, found), (_, parameter) in zip(pipe.named_parameters(), ready.named_parameters(), strict=True):
            assert isinstance(found, DTensor) == isinstance(parameter, DTensor) and not found.is_meta
            grads = whole_grad(found), whole_grad(parameter)
            assert grads[0] is not None and grads[1] is not None and same_bits(*grads), name
            count += 1
        own = {id(parameter) for parameter in pipe.parameters()}
        assert all(p.is_meta for layer in made for p in layer.parameters() if id(p) not in own)
    return count


@pytest.mark.parametrize(("kind", "schedule"), [("dp", "1f1b"), ("tp", "zbv")])
def test_sharded_and_spread_stages(kind: str, schedule: str, group_of: GroupOf, tmp_path: Path) -> None:
    dp = "dp" if kind == "dp" else "tp"
    assert group_of(4).run(over_a_mesh, dp, schedule, str(tmp_path / "saved")) == [2 * 12] * 4


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
    ids, mask, labels = padded_batch(9)
    result = pipe.step(ids, attention_mask=mask, target=labels)
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, config=config).train()
    reference = reference_step(
        whole, (ids, labels), pipe.schedule, layers.loss_fn, kwargs={"attention_mask": mask}, ties=pipe._ties, **options
    )
    reference.outputs = [output.logits for output in reference.outputs]
    assert_same(pipe, result, whole, reference)
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
    return caught(lambda: fastpipe.load_safetensors(folder if dist.get_rank() else "nowhere", pipe))


def test_files_that_one_rank_lacks(group_of: GroupOf, tmp_path: Path) -> None:
    decoder("llama").save_pretrained(tmp_path)
    zero, one = group_of(2).run(missing_files, str(tmp_path))
    assert zero[0] == "FileNotFoundError" and "'nowhere' does not exist" in zero[1]
    assert one[0] in ("StepError", "ValueError")
