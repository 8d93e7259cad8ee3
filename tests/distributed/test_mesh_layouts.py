"""One model on one mesh after the other: checkpoints that are loaded on another, stages on meta, and parity."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from fastpipe import Pipeline, check_parity, load_checkpoint, save_checkpoint
from tests.distributed.ranks import GroupOf
from tests.distributed.test_mesh import LAYERS, MICROBATCHES, Mlp, batch, layers, whole
from tests.runtime.checks import same_bits

Values = dict[str, torch.Tensor]


LAYOUTS: dict[str, tuple[dict[str, int], str]] = {
    "tp": ({"pp": 2, "tp": 2}, "zbv"),
    "pp": ({"pp": 4}, "1f1b"),
    "shard": ({"pp": 2, "dp_shard": 2}, "interleaved_1f1b"),
    "ddp": ({"pp": 2, "dp": 2}, "1f1b"),
    "shard_tp": ({"pp": 2, "dp_shard": 2, "tp": 2}, "zbv"),
    "hybrid": ({"pp": 2, "dp_replicate": 2, "dp_shard": 2}, "1f1b"),
}
"""Dimensions of a mesh, and a schedule."""
SIZES = {name: math.prod(sizes.values()) for name, (sizes, _) in LAYOUTS.items()}


def mesh_of(name: str) -> DeviceMesh:
    sizes, _ = LAYOUTS[name]
    return dist.init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def layers_on(mesh: DeviceMesh, device: str = "cpu") -> list[nn.Module]:
    """As the dimensions of the mesh say."""
    names = mesh.mesh_dim_names or ()
    with torch.device(device):
        made = layers(mesh) if "tp" in names else unspread()
    over = tuple(name for name in names if name.startswith("dp_"))
    return [fully_shard(layer, mesh=mesh[over]) for layer in made] if over else made


def unspread() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Mlp() for _ in range(LAYERS)]


def built(name: str, mesh: DeviceMesh, made: list[nn.Module]) -> Pipeline:
    options: dict[str, Any] = {"data_parallel": mesh["dp"]} if name == "ddp" else {}
    return Pipeline(made, LAYOUTS[name][1], MICROBATCHES, nn.functional.mse_loss, mesh=mesh, **options)


def batch_of(mesh: DeviceMesh, number: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Each replica's own."""
    places = [mesh.get_local_rank(name) for name in mesh.mesh_dim_names or () if name.startswith("dp")]
    return batch(int("".join(map(str, [number, *places]))))


def values(pipe: Pipeline, optimizer: torch.optim.Optimizer) -> Values:
    """Parameters and optimizer state of this process's stages, whole."""
    found = {}
    for name, parameter in pipe.named_parameters():
        found[name] = whole(parameter.detach()).clone()
        found |= {f"{name}: {key}": whole(value).clone() for key, value in optimizer.state[parameter].items()}
    return found


def everywhere(own: Values) -> Values:
    """Those of all processes; where several have one, it must be the same."""
    others: list[Values] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(others, own)
    merged: Values = {}
    for other in others:
        for name, value in other.items():
            assert same_bits(merged.setdefault(name, value), value), name
    return merged


def train(pipe: Pipeline, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, number: int = 0) -> None:
    x, y = batch_of(mesh, number)
    pipe.step(x, target=y)
    optimizer.step()
    optimizer.zero_grad()


def go_round(folder: str, names: Sequence[str]) -> None:
    """Each layout trains, saves, and is loaded by the next."""
    saved: Values = {}
    for number, name in enumerate(names):
        mesh = mesh_of(name)
        pipe = built(name, mesh, layers_on(mesh))
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1)
        if number:
            with torch.no_grad():
                for parameter in pipe.parameters():
                    parameter.zero_()
            load_checkpoint(f"{folder}/{number - 1}", pipe, optimizer)
            loaded = everywhere(values(pipe, optimizer))
            assert loaded.keys() == saved.keys()
            for key, value in loaded.items():
                assert same_bits(value, saved[key]), f"{key} from {names[number - 1]} to {name}"
        train(pipe, optimizer, mesh, number)
        saved = everywhere(values(pipe, optimizer))
        save_checkpoint(f"{folder}/{number}", pipe, optimizer)


def test_checkpoints_of_one_mesh_on_another(group_of: GroupOf, tmp_path: Path) -> None:
    """Each of them is saved, and loads another one."""
    group_of(4).run(go_round, str(tmp_path), ["tp", "pp", "shard", "ddp", "tp"])


def test_checkpoints_of_meshes_of_three_dimensions(group_of: GroupOf, tmp_path: Path) -> None:
    group_of(8).run(go_round, str(tmp_path), ["shard_tp", "hybrid", "shard_tp"])


@pytest.mark.parametrize("name", ["shard", "ddp", "shard_tp", "hybrid"])
def test_parity_beside_replicas(group_of: GroupOf, name: str) -> None:
    group_of(SIZES[name]).run(parity, name)


def parity(name: str) -> None:
    """Each replica has a batch of its own."""
    mesh = mesh_of(name)
    pipe = built(name, mesh, layers_on(mesh))
    unsplit = nn.Sequential(*(layers(mesh) if name == "shard_tp" else unspread()))
    assert (found := check_parity(pipe, unsplit, batch_of(mesh))).ok, str(found)
    train(pipe, torch.optim.SGD(pipe.parameters(), 0.1), mesh)
    found = check_parity(pipe, unsplit, batch_of(mesh))
    assert not found.ok and "parameters differ" in str(found), str(found)


@pytest.mark.parametrize(("name", "how"), [("hybrid", "reset"), ("shard_tp", "load")])
def test_stages_on_meta(group_of: GroupOf, name: str, how: str, tmp_path: Path) -> None:
    group_of(8).run(from_meta, name, how, str(tmp_path / "saved"))


def from_meta(name: str, how: str, folder: str) -> None:
    """Layers that are spread and sharded on meta train like those of the same values that never were there."""
    mesh = mesh_of(name)
    made = layers_on(mesh, "meta")
    assert all(parameter.is_meta for layer in made for parameter in layer.parameters())
    ready, pipe = built(name, mesh, layers_on(mesh)), built(name, mesh, made)
    if how == "load":
        save_checkpoint(folder, ready)
        load_checkpoint(folder, pipe)
    else:
        pipe.to_empty()
        torch.manual_seed(3)
        for stage in pipe.stage_modules.values():
            for module in stage.modules():
                if isinstance(module, nn.Linear | nn.LayerNorm):
                    module.reset_parameters()
        ready.load_state_dict(pipe.state_dict())
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.1) for one in (pipe, ready)]
    for number in range(2):
        x, y = batch_of(mesh, number)
        losses = [one.step(x, target=y).loss for one in (pipe, ready)]
        assert same_bits(losses[0], losses[1])
        for (key, found), (_, expected) in zip(pipe.named_parameters(), ready.named_parameters(), strict=True):
            assert same_bits(whole(found.grad), whole(expected.grad)), key
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    own = {id(parameter) for parameter in pipe.parameters()}
    assert all(p.is_meta for layer in made for p in layer.parameters() if id(p) not in own)
