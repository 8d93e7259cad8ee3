"""What only several processes show: who takes which input, who is told what, and what all have alike."""

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils import _pytree as pytree

import fastpipe
from fastpipe import Pipeline
from fastpipe.runtime.stage.stage import Chain
from tests import scripts
from tests.conftest import BOTH, WAYS
from tests.distributed.ranks import GroupOf, on_ranks, ranks
from tests.runtime.checks import same_bits, train_and_compare
from tests.runtime.models import CASES, WIDTH, Block, squared


def pipeline(executor: str = "auto", schedule: str = "1f1b", **options: Any) -> Pipeline:
    layers = CASES["plain"].layers(8)
    options = {"transport": "process_group", "executor": executor, **options}
    return Pipeline(**{"stages": layers, "schedule": schedule, "num_microbatches": 4, "loss_fn": squared, **options})


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    made = CASES["plain"].batches(1, 9)[0]
    return made.args[0], made.target


class Counted(Iterator[torch.Tensor]):
    """An iterator that knows how much of it was taken."""

    def __init__(self, parts: Any) -> None:
        self.parts = iter(parts)
        self.taken = 0

    def __next__(self) -> torch.Tensor:
        part = next(self.parts)
        self.taken += 1
        return part


def take(executor: str, schedule: str) -> dict[str, Any]:
    pipe = pipeline(executor, schedule)
    x, y = batch()
    inputs, targets = Counted(x.tensor_split(4)), Counted(y.tensor_split(4))
    result = pipe.step(inputs, target=targets, trace=True)
    nothing = pipe.step(x if pipe.needs_input else None, target=y if pipe.needs_target else None)
    spans = {rank: sum(span.rank == rank for span in result.timeline) for rank in range(pipe.num_ranks)}
    return {
        "taken": (inputs.taken, targets.taken),
        "needs": (pipe.needs_input, pipe.needs_target),
        "ends": (pipe.is_first, pipe.is_last),
        "loss": (float(result.loss), float(nothing.loss)),
        "losses": [float(loss) for loss in result.losses],
        "outputs": result.outputs is not None,
        "keys": list(pipe.state_dict()),
        "spans": spans,
    }


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipev"])
def test_each_rank_takes_what_it_needs_and_all_have_the_loss(schedule: str, executor: str, group_of: GroupOf) -> None:
    answers = group_of(2).run(take, executor, schedule)
    both = schedule == "dualpipev"
    for rank, answer in enumerate(answers):
        first, last = rank == 0, rank == (0 if both else 1)
        assert answer["needs"] == answer["ends"] == (first, last)
        assert answer["taken"] == (4 * first, 4 * last)
        assert answer["outputs"] == last
        assert answer["loss"] == answers[0]["loss"] and answer["losses"] == answers[0]["losses"]
        assert answer["spans"] == answers[0]["spans"] and min(answer["spans"].values()) > 4
    keys = [key for answer in answers for key in answer["keys"]]
    assert sorted(keys) == sorted(Chain(dict(enumerate(CASES["plain"].layers(8)))).state_dict())


def caught(call: Callable[[], Any]) -> tuple[str, str, int | None]:
    """The type, text and rank of what a call raises."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), getattr(error, "rank", None)
    return "nothing", "", None


def broken_loader() -> Iterator[torch.Tensor]:
    yield torch.zeros(2, WIDTH)
    raise OSError("the disk is gone")


def refuses(call: Callable[[], Any], said: str, on: int | None = None, kind: type[Exception] = ValueError) -> None:
    """Whether the call is refused by one error on all ranks, or on one by its own, which the others are told."""
    with pytest.raises(Exception, match=said) as raised:
        call()
    if on in (None, dist.get_rank()):
        assert raised.type is kind, raised.value
    else:
        assert raised.type is fastpipe.StepError and raised.value.rank == on, raised.value
    if on is None:
        texts = [""] * dist.get_world_size()
        dist.all_gather_object(texts, str(raised.value))
        assert len(set(texts)) == 1, texts


class Scaled(nn.Module):
    """Hands on scales of a dtype that no header of a message has, or on meta, in some steps."""

    dtype = torch.float32
    device = "cpu"

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, x.detach().abs().to(self.device, self.dtype)


class Unscaled(nn.Module):
    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x + scale.float()


@BOTH
@on_ranks(2)
def test_a_tensor_that_cannot_be_sent_is_refused(executor: str) -> None:
    pipe = pipeline(executor, stages=[nn.Linear(WIDTH, WIDTH), Scaled(), Unscaled(), nn.Linear(WIDTH, WIDTH)])
    x, y = batch()
    Scaled.dtype = torch.float8_e8m0fnu
    refuses(lambda: pipe.step(x, target=y), "(?i)float8_e8m0fnu, which cannot be sent[:;] convert it", 0)
    Scaled.dtype = torch.float32
    assert pipe.step(x, target=y).loss is not None
    Scaled.device = "meta"
    refuses(lambda: pipe.step(x, target=y), "stage 0 returned a tensor on meta", 0)
    Scaled.device = "cpu"
    assert pipe.step(x, target=y).loss is not None


@BOTH
@on_ranks(2)
def test_bad_input_is_told_to_all_and_the_next_step_works(executor: str) -> None:
    pipe, rank = pipeline(executor), dist.get_rank()
    x, y = batch()
    other_calls = "the ranks do not make the same call"
    gathering = "rank 0: step with num_microbatches=4, gather_outputs; rank 1: step with"
    for call, said, *on in (
        (lambda: pipe.step(x), "target = None", 1),
        (lambda: pipe.step([x] * 3, target=y), "the input has 3 microbatches", 0),
        (lambda: pipe.step(broken_loader(), target=y), "the disk is gone", 0, OSError),
        (
            lambda: pipe.step(x, target=y, num_microbatches=4 + rank),
            "num_microbatches=4; rank 1: step with num_microbatches=5",
        ),
        (lambda: pipe.step(x, target=y) if rank else pipe.eval_step(x, target=y), other_calls),
        (lambda: pipe.step(x, target=y, **({"scale": 1.0} if rank else {})), "None for one that a rank does not need"),
        (lambda: pipe.step(x, target=y, gather_outputs=rank == 0), gathering),
        (lambda: pipe.step(x, target=y, trace=rank == 0), gathering.replace("gather_outputs", "trace")),
        (lambda: pipe.step(x, target=y, scale=1.0), "scale: no stage's forward takes"),
        (lambda: pipe.step(x, target=y[:8]), "target has 8 rows"),
    ):
        refuses(call, said, *on)
        pipe.step(x, target=y)


class Turned(nn.Module):
    """Returns what is conjugate or negative only when it is read, and, if asked, what is not dense."""

    def forward(self, x: torch.Tensor, is_sparse: bool = False) -> Any:
        turned = torch.complex(x, x + 1).conj()
        return {"whole": turned, "part": turned.imag, "rest": [x.t().contiguous().t(), x[:, :0], x > 0]} | (
            {"sparse": x.detach().to_sparse()} if is_sparse else {}
        )


@on_ranks(2)
def test_outputs_of_every_kind_are_gathered() -> None:
    pipe = pipeline(stages=[Block(), Turned()], loss_fn=None)
    x, _ = batch()
    own = pipe.eval_step(x).outputs
    refuses(lambda: pipe.eval_step(x, is_sparse=True, gather_outputs=True), "sparse", 1)
    found = pipe.eval_step(x, gather_outputs=True).outputs
    for name in ("whole", "part", "rest"):
        assert own is None or all(map(torch.equal, pytree.tree_leaves(own[name]), pytree.tree_leaves(found[name])))
    assert torch.equal(found["whole"].imag, found["part"]) and found["rest"][1].shape == (len(x), 0)


@on_ranks(2)
def test_an_argument_that_the_pipeline_excludes_leaves_nobody_waiting() -> None:
    (x, y), rank = batch(), dist.get_rank()
    other_calls = "the ranks do not make the same call"
    discards = pipeline(merge=False)
    refuses(lambda: discards.step(x, target=y, gather_outputs=rank == 1), other_calls)


@on_ranks(2)
def test_a_batch_that_is_sharded_over_the_ranks_is_refused() -> None:
    """To split it would be a collective of the first rank alone, which would wait for ever."""
    (x, y), mesh = batch(), dist.init_device_mesh("cpu", (2,))
    spread = distribute_tensor(x, mesh, [Shard(0)])
    pipe = pipeline()
    refuses(lambda: pipe.step(spread, target=y), "DTensor with the placements .*: give the local rows, by to_local", 0)
    pipe.step(x, target=y)


def an_order(lazy: bool) -> fastpipe.Schedule:
    """Two schedules of one name, whose orders differ on the first rank."""
    orders = [["0F0", "0F1", "0B0", "0B1"] if lazy else ["0F0", "0F1", "0B1", "0B0"], ["1F0", "1B0", "1F1", "1B1"]]
    return fastpipe.Schedule.from_actions("mine", fastpipe.Placement.loop(2), 2, orders)


@on_ranks(2)
def test_building_fails_for_all_or_for_none() -> None:
    rank = dist.get_rank()
    for options, said in (
        ({"partition": [5] if rank else "layers"}, r"partition = \[5\]"),
        ({"split": {0: "halves"} if rank else None}, r"split\[0\] = 'halves'"),
        ({"loss_fn": "mse" if rank else squared}, "loss_fn = 'mse'"),
        ({"timeout": -1 if rank else 600}, "timeout = -1"),
        ({"device": "cpux" if rank else None}, "device = 'cpux'"),
    ):
        refuses(lambda options=options: pipeline(**options), said, on=1)
    both = r".*: {} on ranks \[0\], {} on ranks \[1\]"
    default = both.replace("{}", "the default", 1)
    layers = both.format(r"layers 0-3 \| 4-7", r"layers 0-4 \| 5-7")
    placed = both.format(r"\(\(1, 0\),\)", r"\(\(0, 1\),\)")
    for options, said in (
        ({"num_microbatches": 4 + rank}, "^num_microbatches: " + both.format(4, 5)),
        ({"partition": "5,3" if rank else "layers"}, "^partition: " + layers),
        ({"schedule": "gpipe" if rank else "1f1b"}, "^schedule: " + both.format("1f1b", "gpipe")),
        ({"transport": "process_group" if rank else "auto"}, "^transport: " + default.format("process_group")),
        ({"loss_reduction": "sum" if rank else "mean"}, "^loss_reduction: " + default.format("sum")),
        ({"metrics": {"a": sum} if rank else "mean"}, "^metrics: " + default.format("{.a.: .builtins.sum.}")),
        ({"grad_dtype": torch.float64 if rank else None}, "^grad_dtype: " + default.format("torch.float64")),
        ({"recv_lookahead": 1 + rank}, "^recv_lookahead: " + both.format(1, 2)),
        ({"stage_to_rank": [0, 1] if rank else [1, 0]}, "^stage_to_rank: " + placed),
        (
            {"schedule": an_order(lazy=rank == 1), "num_microbatches": 2},
            r"^schedule: .*another order on each of \[\[0\], \[1\]\]",
        ),
        ({"transport": "loopback"}, "there are several processes"),
        ({"num_ranks": 3}, "num_ranks = 3: the group has 2 processes"),
    ):
        refuses(lambda options=options: pipeline(**options), said)
    train_and_compare("plain", "1f1b", 4)


@on_ranks(2)
def test_ranks_with_other_batches_or_autocast_are_refused() -> None:
    rank, pipe = dist.get_rank(), pipeline()
    x, y = batch()
    only_needed = {"target": y if rank else None}

    def refuses(call: Callable[[], Any], said: str) -> None:
        with pytest.raises(ValueError, match=said):
            call()

    input_differs = r"the input has other values on ranks \[1\] than on rank 0"
    target_differs = input_differs.replace("the input", "target")
    refuses(lambda: pipe.step(x + rank, target=y), input_differs)
    refuses(lambda: pipe.step(x, target=y + rank), target_differs)
    refuses(lambda: pipe.step(x, target=y.double() if rank else y), r"target has another dtype or shape on ranks \[1\]")
    refuses(lambda: pipe.step(x if rank == 0 else None, **only_needed, index=rank), "index=0; rank 1")
    pipe.step(x if rank == 0 else None, **only_needed, index=7)
    for number in range(6):
        pipe.step(x + number, target=y + number)
    refuses(lambda: pipe.step(x + rank, target=y + rank), target_differs)
    refuses(lambda: pipe.eval_step(x + rank, target=y), input_differs)
    with torch.autocast("cpu", torch.bfloat16, enabled=rank == 1):
        refuses(lambda: pipe.step(x, target=y), "autocast is off on rank 0 and in torch.bfloat16 on rank 1")
    pipe.step(x, target=y)


@pytest.mark.parametrize(("executor", "transport"), WAYS, indirect=["executor"])
@on_ranks(2)
def test_a_timeout_may_be_infinite(executor: str, transport: str) -> None:
    """Runs on every rank."""
    for timeout in (math.inf, 1e300):
        pipe = pipeline(executor, transport=transport, timeout=timeout)
        x, target = batch()
        assert [pipe.step(x, target=target).loss is not None for _ in range(2)] == [True, True]


def build_in_a_wrong_group() -> None:
    refuses(lambda: pipeline(group="world" if dist.get_rank() else None), "group is a str", on=1, kind=TypeError)


def test_a_wrong_group_on_one_rank_is_an_error_on_all() -> None:
    with ranks(2) as group:
        group.run(build_in_a_wrong_group)


def build_without_rank_one() -> None:
    if dist.get_rank() == 0:
        refuses(lambda: pipeline(timeout=3), "rank 1 did not reach.*within 3 s.*set a longer timeout", on=1)
    dist.barrier()


def test_who_is_missing_when_a_pipeline_is_built_is_named() -> None:
    """A rank that is alive, and waits elsewhere."""
    with ranks(2) as group:
        group.run(build_without_rank_one)


class Picky(nn.Module):
    """Cannot stand zeros, which is what stands in for an activation that was never computed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.any():
            raise ArithmeticError("zeros")
        return x * 1


class FailsOnce(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 4 + 2:
            raise OSError("the true reason")
        return self.block(x)


@BOTH
@on_ranks(4)
def test_who_chokes_on_stand_ins_names_the_true_reason(executor: str) -> None:
    pipe = pipeline(executor, stages=[FailsOnce(), Picky(), Picky(), Block()])
    x, y = batch()
    pipe.step(x, target=y)
    refuses(lambda: pipe.step(x, target=y), "the true reason", on=0, kind=OSError)
    pipe.step(x, target=y)


@on_ranks(4)
def test_pipelines_in_parts_of_the_processes(executor: str) -> None:
    """Two pipelines of two ranks each, side by side, and then one of all four."""
    rank = dist.get_rank()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    # the processes have made different numbers of pipelines before the one that all of them share
    for _ in range(1 + rank // 2):
        train_and_compare("plain", "1f1b", 4, num_ranks=2, group=halves[rank // 2], executor=executor)
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    train_and_compare("plain", "1f1b", 4, num_ranks=2, group=mesh["pp"], executor=executor)
    train_and_compare("plain", "zbv", 4, num_ranks=4, executor=executor)
    text = caught(lambda: pipeline(executor, group=mesh))[1]
    assert "DeviceMesh has 2 dimensions" in text, text


def after_uneven_groups() -> str:
    dist.new_group([0, 1])  # ranks 2 and 3 are in fewer groups than the others
    pipe = pipeline("python", num_ranks=4)
    x, y = batch()
    pipe.step(x, target=y)
    return str(pipe.transport.describe())


@pytest.mark.parametrize("backend", [None, "cpu:gloo", "gloo"])
def test_who_is_in_more_groups_than_another_builds_with_it(backend: str | None) -> None:
    with ranks(4, backend=backend) as started:
        assert all("four gloo groups" in text for text in started.run(after_uneven_groups))


def script(folder: str) -> None:
    """A training script as a user writes it: no process group, no question which rank it is."""
    torch.manual_seed(0)
    layers = [Block() for _ in range(4)]
    pipe = Pipeline(layers, "1f1b", 4, squared, num_ranks=2)
    optimizer = torch.optim.SGD(list(pipe.parameters()), 0.1)
    x, y = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    for _ in range(3):
        optimizer.zero_grad()
        result = pipe.step(x, target=y)
        optimizer.step()
    rank = os.environ.get("RANK", "alone")
    torch.save((result.loss, pipe.state_dict()), Path(folder) / f"{rank}.pt")


def test_the_same_script_alone_and_as_processes(tmp_path: Path) -> None:
    """With RANK set a group is made and ended by fastpipe itself; the numbers are those of one process."""
    path = tmp_path / "script.py"
    path.write_text(f"from tests.distributed.test_step import script\nscript({str(tmp_path)!r})")
    for processes in (0, 2):
        ran = scripts.attempt(path, processes=processes)
        assert not any(ran.statuses) and "Warning" not in ran.err, ran
    loss, state = torch.load(tmp_path / "alone.pt")
    for rank in range(2):
        its_loss, its_state = torch.load(tmp_path / f"{rank}.pt")
        assert same_bits(its_loss, loss) and its_state
        assert all(same_bits(value, state[key]) for key, value in its_state.items())
