"""docs/coming-from-torch.md: its scripts train alike; torch's stages and schedules run as they are."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleavedZeroBubble
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.distributed.tensor import DTensor

import fastpipe
from fastpipe import Pipeline, Schedule, check_parity
from fastpipe.cli import main
from tests.distributed.ranks import GroupOf, on_ranks
from tests.runtime.traced_models import WIDTH, Sharing, Skipping, traced
from tests.scripts import run

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs/coming-from-torch.md").read_text()
AS_THE_PAGE_SAYS = pytest.mark.skipif(
    torch.__version__ < (2, 13), reason="the page is about torch 2.13; of 2.11 the schedules in V hang over Gloo"
)
SCRIPTS = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


def losses(script: str, folder: Path) -> set[tuple[str, str]]:
    """Step and loss, as two processes print them."""
    path = folder / "script.py"
    path.write_text(script)
    shown = run(path, processes=2)
    found = re.findall(r"step (\d): loss (\d\.\d{6})", shown)
    assert len(found) == 6, shown
    return set(found)


def test_all_scripts_have_the_same_losses(tmp_path: Path) -> None:
    by_torch, *others = [losses(script, tmp_path) for script in SCRIPTS]
    assert len(by_torch) == 3 and others == [by_torch] * 3
    ordered = [float(loss) for _, loss in sorted(by_torch)]
    assert ordered == sorted(ordered, reverse=True) and ordered[0] > ordered[-1]


def test_lines_are_counted() -> None:
    for script, who in zip(SCRIPTS, ("torch", "fastpipe"), strict=False):
        assert who in script
    (row,) = re.findall(r"\| lines of the script above \| (\d+) \| (\d+) \|", PAGE)
    assert [int(count) for count in row] == [len([line for line in s.splitlines() if line]) for s in SCRIPTS[:2]]


def stages_of(layers: list[nn.Module], indices: list[int], num_stages: int = 4) -> list[Any]:
    cut = len(layers) // num_stages
    return [
        PipelineStage(nn.Sequential(*layers[i * cut : i * cut + cut]), i, num_stages, torch.device("cpu"))
        for i in indices
    ]


def made_layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8)]


@on_ranks(2)
def test_torch_s_stages_run_torch_s_files(executor: str, tmp_path: Path) -> None:
    """Both of torch's formats, its own stages."""
    rank = dist.get_rank()
    layers = made_layers()
    stages = stages_of(layers, [rank, rank + 2])
    zero_bubble = ScheduleInterleavedZeroBubble(stages, n_microbatches=4)
    lowered = _PipelineScheduleRuntime(stages, 4)
    lowered.pipeline_order = zero_bubble.pipeline_order
    lowered._prepare_schedule_with_comms(zero_bubble.pipeline_order)
    x, y = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(3))
    for name in ("compute_only", "compute_comms"):
        path = tmp_path / f"{name}{rank}.csv"  # each process loads its own
        lowered._dump_csv(path, format=name)
        given: Any = stages if name == "compute_only" else {stage.stage_index: stage for stage in stages}
        pipe = Pipeline(given, Schedule.from_csv(path), loss_fn=nn.functional.mse_loss, executor=executor)
        parity = check_parity(pipe, made_layers(), (x, y))
        assert parity.ok, parity
        assert [n for n, _ in pipe.named_parameters()][0] == f"{rank}.0.0.weight"


def one_group(executor: str) -> tuple[int, int]:
    """The stages' own group: two pipelines of two processes each."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    layers = made_layers()
    part = nn.Sequential(*layers[4 * (rank % 2) :][:4])
    stage = PipelineStage(part, rank % 2, 2, torch.device("cpu"), group=groups[rank // 2])
    pipe = Pipeline(stage, "1f1b", 4, nn.functional.mse_loss, executor=executor)
    x, y = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(rank // 2))
    assert check_parity(pipe, layers, (x, y)).ok
    return pipe.rank, pipe.num_ranks


def test_the_group_of_the_stages_is_used(executor: str, group_of: GroupOf) -> None:
    assert group_of(4).run(one_group, executor) == [(0, 2), (1, 2), (0, 2), (1, 2)]


@on_ranks(2)
def test_stages_built_of_a_traced_model(executor: str) -> None:
    """Stages built of a traced model, several a rank."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Skipping()
    twin = copy.deepcopy(model)
    pipe = traced(model, torch.randn(2, WIDTH), torch.randn(2, WIDTH))
    stages = [pipe.build_stage(index, torch.device("cpu")) for index in (rank, 3 - rank)]
    x, shift, y = torch.randn(3, 8, WIDTH, generator=torch.Generator().manual_seed(3))
    parity = check_parity(Pipeline(stages, "zbv", 4, nn.functional.mse_loss, executor=executor), twin, ((x, shift), y))
    assert parity.ok, parity


@on_ranks(2)
@pytest.mark.parametrize("declared", [False, True])
def test_a_weight_of_stages_built_of_a_traced_model_is_tied(declared: bool) -> None:
    """Each process has one of the two stages that read it."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Sharing()
    stage = traced(copy.deepcopy(model), torch.randn(2, WIDTH)).build_stage(rank, torch.device("cpu"))
    pipe = Pipeline(stage, "1f1b", 4, nn.functional.mse_loss, tied=[("0.scale", "1.scale")] if declared else None)
    x, y = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(3))
    assert "0.scale = 1.scale" in pipe.describe()
    assert all(d.relative < 1e-5 for d in check_parity(pipe, model, (x, y)).differences)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    pipe.step(x, target=y)
    optimizer.step()
    nn.functional.mse_loss(model(x), y).backward()
    scale = pipe.state_dict()[f"{rank}.scale"]
    torch.testing.assert_close(scale, (model.scale - 0.1 * model.scale.grad).detach())


@AS_THE_PAGE_SAYS
@on_ranks(2)
def test_torch_runs_what_convert_writes(tmp_path: Path) -> None:
    """With the gradients of the mean, sharded stages in several steps included."""
    rank = dist.get_rank()
    x, y = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(3))
    schedule = fastpipe.make_schedule("zbv", num_ranks=2, num_microbatches=4)
    plain, comms = tmp_path / f"plain{rank}.csv", tmp_path / f"comms{rank}.csv"
    schedule.to_csv(plain)
    assert main(["convert", str(plain), "--to", "comms", "-o", str(comms)]) == 0
    model = nn.Sequential(*made_layers())
    nn.functional.mse_loss(model(x), y).backward()

    layers, alone = made_layers(), init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))["dp"]
    stages = stages_of(layers, [rank, 3 - rank])
    fully_shard(stages[0].submod, mesh=alone)
    by_torch = _PipelineScheduleRuntime(stages, 4, loss_fn=nn.functional.mse_loss)
    by_torch._load_csv(str(comms), format="compute_comms")
    for _ in range(2):
        for layer in layers:
            layer.zero_grad()
        by_torch.step(*([x] if rank == 0 else []), **({} if rank else {"target": y}))
    for index in (rank, 3 - rank):
        for mine, reference in zip(layers[2 * index].parameters(), model[2 * index].parameters(), strict=True):
            grad = mine.grad.full_tensor() if isinstance(mine.grad, DTensor) else mine.grad
            torch.testing.assert_close(grad, reference.grad)


@on_ranks(2)
def test_what_does_not_fit_is_refused() -> None:
    rank = dist.get_rank()
    layers = made_layers()
    right, vshaped = stages_of(layers, [rank, rank + 2]), stages_of(layers, [rank, 3 - rank])
    builder = PipelineStage(layers[0], 0, 4, torch.device("cpu"), dw_builder=lambda: print)
    cases: list[tuple[Any, str, str]] = [
        (right, "1f1b", "PipelineStage 0 is of 4 stages but the schedule has 2"),
        (vshaped, "interleaved_1f1b", "lacks stage 2, which this process computes"),
        ([right[0], right[0]], "interleaved_1f1b", "PipelineStage 0 twice"),
        ([right[0], layers[0]], "interleaved_1f1b", "stages has a Sequential beside torch's stages"),
        ([builder, right[1]], "interleaved_1f1b", "has a dw_builder; leave it out"),
    ]
    for given, schedule, said in cases:
        with pytest.raises(Exception, match="" if rank else said):
            Pipeline(given, schedule, 4, nn.functional.mse_loss)
    for options in ({"partition": "flops", "example": torch.randn(2, WIDTH)}, {"partition": [2, 2, 2, 2]}):
        with pytest.raises(ValueError, match="these stages are cut already; omit partition"):
            Pipeline(right, "interleaved_1f1b", 4, nn.functional.mse_loss, **options)


@AS_THE_PAGE_SAYS
@on_ranks(2)
def test_what_the_page_says_of_torch_is_so() -> None:
    """And the same here."""
    rank = dist.get_rank()
    x, y = torch.randn(2, 16, WIDTH, generator=torch.Generator().manual_seed(3))
    grads: dict[str, list[torch.Tensor]] = {"torch": [], "fastpipe": []}

    def note(who: str, module: nn.Module) -> None:
        grads[who].append(next(module.parameters()).grad.clone())  # type: ignore[union-attr]

    (stage,) = stages_of(made_layers(), [rank], num_stages=2)
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    for call in ("step", "step", "eval"):
        getattr(schedule, call)(*([x] if rank == 0 else []), **({} if rank == 0 else {"target": y}))
        note("torch", stage.submod)
    schedule._loss_fn = lambda output, target: output.square().mean()
    rows = schedule.eval(x[:15]) if rank == 0 else schedule.eval(target=y[:15])

    pipe = Pipeline(made_layers(), "1f1b", 4, nn.functional.mse_loss)
    for call in ("step", "step", "eval_step"):
        getattr(pipe, call)(x, target=y)
        note("fastpipe", pipe.stage_modules[rank])
    ours = pipe.step(x[:15], target=y[:15]).outputs
    for who, factors in (("torch", [1, 1.25, 1.25 / 4]), ("fastpipe", [1, 2, 2])):
        assert [float((grad / grads[who][0]).mean()) for grad in grads[who]] == pytest.approx(factors, rel=1e-3)
    assert rank == 0 or (len(rows), len(ours)) == (16, 15)
