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

import fastpipe
from fastpipe import Pipeline
from fastpipe.runtime.stage.stage import Chain
from tests import scripts
from tests.conftest import BOTH, WAYS
from tests.distributed.ranks import GroupOf, ranks
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


def mistakes(rank: int) -> dict[str, Callable[[Pipeline], Any]]:
    """Steps with a mistake on one rank, or on all."""
    x, y = batch()
    return {
        "no target": lambda p: p.step(x),
        "a short list": lambda p: p.step([x] * 3, target=y),
        "a broken loader": lambda p: p.step(broken_loader(), target=y),
        "unequal counts": lambda p: p.step(x, target=y, num_microbatches=4 + rank),
        "unequal calls": lambda p: p.step(x, target=y) if rank else p.eval_step(x, target=y),
        "unequal keywords": lambda p: p.step(x, target=y, **({"scale": 1.0} if rank else {})),
        "unequal gathering": lambda p: p.step(x, target=y, gather_outputs=rank == 0),
        "an unknown keyword": lambda p: p.step(x, target=y, scale=1.0),
        "unequal rows": lambda p: p.step(x, target=y[:8]),
    }


def make_mistakes(executor: str) -> dict[str, Any]:
    pipe = pipeline(executor)
    x, y = batch()
    found = {}
    for name, mistake in mistakes(pipe.rank).items():
        found[name] = caught(lambda mistake=mistake: mistake(pipe))
        pipe.step(x, target=y)
    return found


@BOTH
def test_bad_input_is_told_to_all_and_the_next_step_works(executor: str, group_of: GroupOf) -> None:
    zero, one = group_of(2).run(make_mistakes, executor)

    def check(name: str, rank: int, kind: str, text: str) -> None:
        own, other = (zero, one) if rank == 0 else (one, zero)
        assert own[name][0] == kind and text in own[name][1], own[name]
        assert other[name][0] == "StepError" and other[name][2] == rank and text in other[name][1], other[name]

    check("no target", 1, "ValueError", "target = None")
    check("a short list", 0, "ValueError", "the input has 3 microbatches")
    check("a broken loader", 0, "OSError", "the disk is gone")
    for name, text in {
        "unequal counts": "num_microbatches=4; rank 1: step with num_microbatches=5",
        "unequal calls": "the ranks do not make the same call",
        "unequal keywords": "the ranks do not make the same call",
        "unequal gathering": "rank 0: step with num_microbatches=4, gather_outputs; rank 1: step with",
        "an unknown keyword": "scale: no stage's forward takes",
        "unequal rows": "target has 8 rows",
    }.items():
        assert zero[name][:2] == one[name][:2]
        assert zero[name][0] == "ValueError" and text in zero[name][1], zero[name]


def an_order(lazy: bool) -> fastpipe.Schedule:
    """Two schedules of one name, whose orders differ on the first rank."""
    orders = [["0F0", "0F1", "0B0", "0B1"] if lazy else ["0F0", "0F1", "0B1", "0B0"], ["1F0", "1B0", "1F1", "1B1"]]
    return fastpipe.Schedule.from_actions("mine", fastpipe.Placement.loop(2), 2, orders)


def build_badly() -> dict[str, Any]:
    rank = dist.get_rank()
    found = {
        "one rank": caught(lambda: pipeline(partition=[5] if rank == 1 else "layers")),
        "a rule on one rank": caught(lambda: pipeline(split={0: "halves"} if rank == 1 else None)),
        "a loss on one rank": caught(lambda: pipeline(loss_fn="mse" if rank == 1 else squared)),
        "a timeout on one rank": caught(lambda: pipeline(timeout=-1 if rank == 1 else 600)),
        "a device on one rank": caught(lambda: pipeline(device="cpux" if rank == 1 else None)),
        "different": caught(lambda: pipeline(num_microbatches=4 + rank)),
        "partitions": caught(lambda: pipeline(partition="5,3" if rank else "layers")),
        "schedules": caught(lambda: pipeline(schedule="gpipe" if rank else "1f1b")),
        "transports": caught(lambda: pipeline(transport="process_group" if rank else "auto")),
        "reductions": caught(lambda: pipeline(loss_reduction="sum" if rank else "mean")),
        "dtypes": caught(lambda: pipeline(grad_dtype=torch.float64 if rank else None)),
        "lookaheads": caught(lambda: pipeline(recv_lookahead=1 + rank)),
        "placements": caught(lambda: pipeline(stage_to_rank=[0, 1] if rank else [1, 0])),
        "orders": caught(lambda: pipeline(schedule=an_order(lazy=rank == 1), num_microbatches=2)),
        "loopback": caught(lambda: pipeline(transport="loopback")),
        "too many ranks": caught(lambda: pipeline(num_ranks=3)),
    }
    train_and_compare("plain", "1f1b", 4)
    return found


def other_batches() -> dict[str, Any]:
    """Runs on every rank: batches that are not the same on both."""
    rank, pipe = dist.get_rank(), pipeline()
    x, y = batch()
    found = {
        "inputs": caught(lambda: pipe.step(x + rank, target=y)),
        "targets": caught(lambda: pipe.step(x, target=y + rank)),
        "numbers": caught(lambda: pipe.step(x if rank == 0 else None, target=y if rank else None, index=rank)),
        "only what is needed": caught(lambda: pipe.step(x if rank == 0 else None, target=y if rank else None, index=7)),
    }
    for number in range(6):
        found[f"step {number}"] = caught(lambda number=number: pipe.step(x + number, target=y + number))
    found["a step is left out"] = caught(lambda: pipe.step(x + rank, target=y + rank))
    found["eval"] = caught(lambda: pipe.eval_step(x + rank, target=y))
    found["the next"] = caught(lambda: pipe.step(x, target=y))
    return found


def test_ranks_with_other_batches_are_refused(group_of: GroupOf) -> None:
    for answer in group_of(2).run(other_batches):
        for name in ("inputs", "targets", "a step is left out", "eval"):
            kind, text, _ = answer.pop(name)
            argument = "the input" if name in ("inputs", "eval") else "target"
            said = f"{argument} has other values on ranks [1] than on rank 0"
            assert kind == "ValueError" and said in text, (name, text)
        kind, text, _ = answer.pop("numbers")
        assert kind == "ValueError" and "index=0; rank 1" in text, text
        assert {kind for kind, *_ in answer.values()} == {"nothing"}, answer


def wait_for_ever(executor: str, transport: str) -> None:
    """Runs on every rank."""
    for timeout in (math.inf, 1e300):
        pipe = pipeline(executor, transport=transport, timeout=timeout)
        x, target = batch()
        assert [pipe.step(x, target=target).loss is not None for _ in range(2)] == [True, True]


@pytest.mark.parametrize(("executor", "transport"), WAYS, indirect=["executor"])
def test_a_timeout_may_be_infinite(executor: str, transport: str, group_of: GroupOf) -> None:
    group_of(2).run(wait_for_ever, executor, transport)


def test_building_fails_for_all_or_for_none(group_of: GroupOf) -> None:
    zero, one = group_of(2).run(build_badly)
    assert one["one rank"][0] == "ValueError" and "partition = [5]" in one["one rank"][1]
    assert zero["one rank"][0] == "StepError" and zero["one rank"][2] == 1
    for name, text in {
        "a rule on one rank": "split[0] = 'halves'",
        "a loss on one rank": "loss_fn = 'mse'",
        "a timeout on one rank": "timeout = -1",
        "a device on one rank": "device = 'cpux'",
    }.items():
        assert one[name][0] == "ValueError" and text in one[name][1]
        assert zero[name][0] == "StepError" and text in zero[name][1]
    for name, text in {
        "different": "num_microbatches: .*: 4 on ranks [0], 5 on ranks [1]",
        "partitions": "partition: .*: layers 0-3 | 4-7 on ranks [0], layers 0-4 | 5-7 on ranks [1]",
        "schedules": "schedule: .*: 1f1b on ranks [0], gpipe on ranks [1]",
        "transports": "transport: .*: the default on ranks [0], process_group on ranks [1]",
        "reductions": "loss_reduction: .*: the default on ranks [0], sum on ranks [1]",
        "dtypes": "grad_dtype: .*: the default on ranks [0], torch.float64 on ranks [1]",
        "lookaheads": "recv_lookahead: .*: 1 on ranks [0], 2 on ranks [1]",
        "placements": "stage_to_rank: .*: ((1, 0),) on ranks [0], ((0, 1),) on ranks [1]",
        "orders": "schedule: .*another order on each of [[0], [1]]",
    }.items():
        argument, _, values = text.partition(".*")
        for kind, message, *_ in (zero[name], one[name]):
            assert kind == "ValueError" and message.startswith(argument) and values in message, message
    assert "there are several processes" in zero["loopback"][1]
    assert "num_ranks = 3: the group has 2 processes" in zero["too many ranks"][1]


def build_in_a_wrong_group() -> tuple[str, str, int | None]:
    return caught(lambda: pipeline(group="world" if dist.get_rank() == 1 else None))


def test_a_wrong_group_on_one_rank_is_an_error_on_all() -> None:
    with ranks(2) as group:
        zero, one = group.run(build_in_a_wrong_group)
    assert one[0] == "TypeError" and "group is a str" in one[1]
    assert zero[0] == "StepError" and zero[2] == 1 and "group is a str" in zero[1]


def build_without_rank_one() -> tuple[str, str, int | None] | None:
    found = caught(lambda: pipeline(timeout=1)) if dist.get_rank() == 0 else None
    dist.barrier()
    return found


def test_who_is_missing_when_a_pipeline_is_built_is_named() -> None:
    """A rank that is alive, and waits elsewhere."""
    with ranks(2) as group:
        zero, _ = group.run(build_without_rank_one)
    assert zero[0] == "StepError" and zero[2] == 1
    assert "rank 1 did not reach" in zero[1] and "within 1 s" in zero[1] and "set a longer timeout" in zero[1]


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


def fail_upstream(executor: str) -> tuple[str, str, int | None]:
    stages = [FailsOnce(), Picky(), Picky(), Block()]
    pipe = pipeline(executor, stages=stages)
    x, y = batch()
    pipe.step(x, target=y)
    answer = caught(lambda: pipe.step(x, target=y))
    pipe.step(x, target=y)
    return answer


@BOTH
def test_who_chokes_on_stand_ins_names_the_true_reason(executor: str, group_of: GroupOf) -> None:
    answers = group_of(4).run(fail_upstream, executor)
    assert answers[0][0] == "OSError"
    for answer in answers[1:]:
        assert answer[0] == "StepError" and answer[2] == 0 and "the true reason" in answer[1], answer


def in_halves(executor: str) -> None:
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


def test_pipelines_in_parts_of_the_processes(executor: str, group_of: GroupOf) -> None:
    group_of(4).run(in_halves, executor)


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
