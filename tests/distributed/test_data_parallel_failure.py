"""A step that fails in one replica: nobody waits for it, all are told, and the next step is right in both."""

import contextlib
import os
import re
import signal
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from fastpipe import Pipeline, Placement, Schedule
from fastpipe.runtime import construction
from fastpipe.runtime.common import is_lost_connection, lost_text, torch_private
from fastpipe.runtime.data_parallel import DataParallel
from tests.conftest import executors_in_turn
from tests.distributed.meshes import (
    LAYERS,
    WIDTH,
    Block,
    Reference,
    batch,
    build,
    layers,
    mesh,
    mesh_and_replica,
    step,
    wrong_gradients,
)
from tests.distributed.ranks import GroupOf, on_ranks, ranks
from tests.distributed.test_step import caught
from tests.patience import PATIENCE

FAULTS = {
    "first forward": (0, "forward", 0),
    "last stage": (LAYERS - 1, "forward", 2),
    "last forward": (5, "forward", 4),
    "a backward": (3, "backward", 1),
    "last backward": (0, "backward", 4),
}
"""The layer that fails, where, and at which call."""


class Trap(Block):
    """Fails on purpose when it is set."""

    where, calls = "", 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._count("forward")
        output = super().forward(x)
        if output.requires_grad:
            output.register_hook(lambda grad: self._count("backward"))
        return output

    def _count(self, where: str) -> None:
        self.calls -= where == self.where
        if where == self.where and self.calls < 0:
            raise OSError("on purpose")


def traps() -> list[nn.Module]:
    made = layers()
    for block in made:
        block.__class__ = Trap
    return made


def fail_and_go_on(wrap: str, executor: str) -> dict[str, Any]:
    over, replica = mesh_and_replica()
    whole: list[Any] = []

    def made() -> list[nn.Module]:
        whole.extend(traps())
        return whole

    pipe = build(wrap, "zbv", executor, over, made=made)
    found = {}
    for name, (layer, where, calls) in FAULTS.items():
        if replica == 0:
            whole[layer].where, whole[layer].calls = where, calls
        found[name] = caught(lambda: step(pipe, 0, replica))
        whole[layer].where = ""
        check_next_step(pipe, replica)
    return found


@executors_in_turn("wrap", ["ddp", "fsdp"])
def test_a_failure_reaches_all_replicas_and_the_next_step_is_right(wrap: str, executor: str, group_of: GroupOf) -> None:
    answers = group_of(4).run(fail_and_go_on, wrap, executor)
    for name in FAULTS:
        kinds = [answer[name][0] for answer in answers]
        assert sorted(kinds) == ["OSError", "StepError", "StepError", "StepError"], (name, answers)
        assert "OSError" in kinds[:2]
        assert all("on purpose" in answer[name][1] for answer in answers[:2])
        # with the place in the replica that failed, and with their own
        for _, text, rank in (answer[name] for answer in answers[2:]):
            assert re.search(r"REDUCE_GRAD: .* replica.*: rank \d, stage \d, .*on purpose", text), text
            assert rank in (0, 1) and f"rank {rank}, stage " in text.partition("REDUCE_GRAD")[0], (rank, text)


def fails_within_no_sync(executor: str) -> tuple[str, str]:
    over, replica = mesh_and_replica()
    whole = traps()
    pipe = build("fsdp", "zbv", executor, over, made=lambda: whole)
    if replica == 0:
        whole[0].where, whole[0].calls = FAULTS["a backward"][1:]  # type: ignore[assignment]
    with pipe.no_sync():
        found = caught(lambda: step(pipe, 0, replica))[:2]
    whole[0].where = ""
    check_next_step(pipe, replica)
    return found


def test_gradients_of_a_failed_step_within_no_sync_do_not_wait_for_the_next(executor: str, group_of: GroupOf) -> None:
    """They wait in gathered parameters, where nobody else can drop them."""
    (kind, own), *others = group_of(4).run(fails_within_no_sync, executor)
    assert kind == "OSError" and own == "on purpose"
    assert all(kind == "StepError" and "on purpose" in text for kind, text in others), others


def refuses_its_input(wrap: str, executor: str) -> tuple[str, str, str]:
    over, replica = mesh_and_replica()
    pipe = build(wrap, "zbv", executor, over)
    x, target = batch(0, replica)
    rows = len(x) if replica == 0 else 2
    found = caught(lambda: pipe.step(x[:rows], target=target[:rows]))[:2]
    check_next_step(pipe, replica)
    rows = len(x) - (dist.get_rank() == 3)  # other than on rank 2
    _, differs, _ = caught(lambda: pipe.step(x[:rows], target=target[:rows]))
    return *found, differs


@executors_in_turn("wrap", ["ddp", "fsdp"])
def test_what_one_replica_refuses_is_an_error_in_all(wrap: str, executor: str, group_of: GroupOf) -> None:
    """None waits for it, and it is not a step ahead of the others afterwards."""
    answers = group_of(4).run(refuses_its_input, wrap, executor)
    assert [kind for kind, *_ in answers[:3]] == ["StepError", "StepError", "ValueError"], answers
    for _, text, differs in answers[:2]:
        assert "rank 0 refused its input: ValueError: the input has 2 rows" in text
        assert "its pipeline refused its input: ValueError" in differs and "another dtype or shape on ranks" in differs


def is_interrupted(wrap: str, executor: str) -> tuple[str, str]:
    over, replica = mesh_and_replica()
    whole = layers()
    pipe = build(wrap, "zbv", executor, over, made=lambda: whole)
    if replica == 0 and pipe.rank == 0:
        hook = whole[0].register_forward_pre_hook(lambda module, args: os.kill(os.getpid(), signal.SIGINT))
    try:
        step(pipe, 0, replica)
    except BaseException as error:  # KeyboardInterrupt, too
        found = type(error).__name__, str(error)
    if replica == 0 and pipe.rank == 0:
        hook.remove()
    check_next_step(pipe, replica)
    return found


@executors_in_turn("wrap", ["ddp", "fsdp"])
def test_an_interrupted_replica_says_so(wrap: str, executor: str, group_of: GroupOf) -> None:
    (kind, _), *others = group_of(4).run(is_interrupted, wrap, executor)
    assert kind == "KeyboardInterrupt"
    assert all(kind == "StepError" and "rank 0: KeyboardInterrupt" in text for kind, text in others), others


def loses_a_rank_between_steps(wrap: str) -> tuple[str, str]:
    over, replica = mesh_and_replica()
    pipe = build(wrap, "zbv", "auto", over, timeout=PATIENCE)
    step(pipe, 0, replica)
    if dist.get_rank() == 3:
        os._exit(0)
    return caught(lambda: step(pipe, 1, replica))[:2]


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_a_replica_whose_pipeline_has_ended_keeps_nobody_waiting(wrap: str) -> None:
    """Its rank 0 never begins the step, and its process goes on."""
    with ranks(4) as group:
        group.start(loses_a_rank_between_steps, wrap)
        answers = group.results([0, 1, 2])
    assert [kind for kind, _ in answers] == ["StepError"] * 3, answers
    assert all(re.search("process [23] has exited, or has closed its connec", text) for _, text in answers[:2]), answers
    assert "rank 1: its process died" in answers[2][1], answers


def fails_at_the_end_of_the_backward() -> tuple[str, str]:
    def end() -> None:
        raise OSError("on purpose")

    over, replica = mesh_and_replica()
    pipe = build("fsdp", "zbv", "auto", over)
    (stage, *_) = pipe._steps.stages
    if replica == 0:
        stage.parallel._end_backward = end  # type: ignore[union-attr]
    return caught(lambda: step(pipe, 0, replica))[:2]


def test_a_failure_after_the_program_reaches_all_replicas(group_of: GroupOf) -> None:
    (kind, own), (other, text) = group_of(2).run(fails_at_the_end_of_the_backward)
    assert kind == other == "StepError" and "on purpose" in own
    assert "the step failed in another of the replicas" in text and "on purpose" in text


def with_hook(when: str, check: Callable[[], None]) -> Callable[[nn.Module, Any], nn.Module]:
    """DistributedDataParallel whose communication hook checks something instead of its collective, or after it."""

    def wrap(module: nn.Module, over: Any) -> nn.Module:
        def average(future: Any) -> torch.Tensor:
            check()
            averaged: torch.Tensor = future.value()[0].div_(2)
            return averaged

        def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            if when == "out of step":
                check()
            work = dist.all_reduce(bucket.buffer(), group=over.get_group(), async_op=True)
            return work.get_future().then(average)

        wrapped = DistributedDataParallel(module, process_group=over.get_group())
        wrapped.register_comm_hook(None, hook)
        return wrapped

    return wrap


def check_while_reducing(group: Any, when: str, check: Callable[[], None]) -> None:
    """The same with a group of parameters of fully_shard, before the collective or after it."""
    name = "post_backward" if when == "after" else "_wait_for_post_backward"
    function = getattr(group, name)

    def reduce(*args: Any) -> None:
        function(*args)
        if group.reduce_grads:
            check()

    setattr(group, name, reduce)


def check_next_step(pipe: Pipeline, replica: int) -> None:
    """A step after the one that failed has the gradients of the unsplit model."""
    for parameter in pipe.parameters():
        parameter.grad = None
    reference = Reference(pipe)
    step(pipe, 1, replica)
    reference.step(1)
    assert not (wrong := wrong_gradients(pipe, reference)), wrong


def no_memory(group: Any, processes: Any, num_begun: int) -> None:
    if processes is not None:
        raise RuntimeError("no memory for zeros either")


def fails_while_reducing(wrap: str, when: str, executor: str) -> tuple[str, str]:
    """One replica raises a RuntimeError of its own, as a lack of memory is, before its collective or after it."""
    over, replica = mesh_and_replica()
    fails = [replica == 0]

    def check() -> None:
        if fails[0]:
            fails[0] = False
            raise RuntimeError("on purpose")

    pipe = build(with_hook(when, check) if wrap == "ddp" else "fsdp", "zbv", executor, over, timeout=20.0)
    if wrap == "fsdp":
        check_while_reducing(pipe._steps.stages[0].parallel._groups[1], when, check)  # type: ignore[union-attr]
    with pytest.MonkeyPatch.context() as patches:
        if when == "twice":
            patches.setattr(torch_private, "join_fsdp_collective", no_memory)
        found = caught(lambda: step(pipe, 0, replica))[:2]
    if when in ("out of step", "twice"):
        return found
    check_next_step(pipe, replica)
    return found


@executors_in_turn("wrap,when", [("ddp", "after"), ("fsdp", "before"), ("fsdp", "after")])
def test_an_error_while_reducing_is_not_a_lost_replica(wrap: str, when: str, executor: str, group_of: GroupOf) -> None:
    (kind, own), (other, text) = group_of(2).run(fails_while_reducing, wrap, when, executor)
    assert kind == "RuntimeError" and "on purpose" in own, (kind, own)
    assert other == "StepError" and re.search("the step failed in .* replicas.*on purpose", text), text


@pytest.mark.parametrize(
    ("wrap", "when", "why"), [("ddp", "out of step", "on purpose"), ("fsdp", "twice", "no memory")]
)
def test_a_replica_that_leaves_out_a_collective_ends_the_pipelines(wrap: str, when: str, why: str) -> None:
    """The replicas are not in step, and the other one is unblocked at once. Of the two stages in a group the second one
    begins no collective: Gloo would end the process that gets messages of another size."""
    with ranks(2) as group:
        (kind, own), (other, text) = group.run(fails_while_reducing, wrap, when, "auto")
    assert kind == other == "StepError", (own, text)
    assert why in own and "has exited" not in own and "the pipeline is closed" in own
    assert "process 0 has exited, or has closed its connections after a failure" in text


def reduces_nothing() -> str:
    def wrap(module: nn.Module, over: Any) -> nn.Module:
        wrapped = DistributedDataParallel(module, process_group=over.get_group())
        wrapped.register_comm_hook(None, lambda state, bucket: None)  # type: ignore[arg-type,return-value]
        return wrapped

    over, replica = mesh_and_replica()
    return caught(lambda: step(build(wrap, "zbv", "auto", over), 0, replica))[1]


def test_a_hook_that_returns_no_future_is_refused() -> None:
    """torch would read what None points to."""
    with ranks(2) as group:
        for text in group.run(reduces_nothing):
            assert "the communication hook returned a NoneType" in text or "has closed its connections" in text, text


AGAIN = "0UNSHARD 0F0 0F1 1UNSHARD 1F0 1F1 0RESHARD 1B0 1B1 1REDUCE_GRAD 0UNSHARD 0B0 0B1 0REDUCE_GRAD"


def gathers_again(executor: str) -> list[str]:
    """The last stage's reduction is left out on one replica; what each says, and what another pipeline there does."""
    over, replica = mesh_and_replica()
    schedule = Schedule.from_actions("again", Placement.custom([0, 0]), 2, [AGAIN.split()])
    pipe, other = (build("fsdp", schedule, executor, over, num_microbatches=None) for _ in range(2))
    if replica == 0:
        group = pipe._steps.stages[1].parallel._groups[1]  # type: ignore[union-attr]
        check_while_reducing(group, "before", lambda: no_memory(group, over, 0))
    with mock.patch.object(torch_private, "join_fsdp_collective", no_memory):
        return [caught(partial(step, one, 0, replica))[1] for one in (pipe, other)]


def test_nothing_is_gathered_in_a_group_that_is_broken(executor: str) -> None:
    with ranks(2) as group:
        for texts, said in zip(group.run(gathers_again, executor), ("no memory", "process 0 has exited"), strict=True):
            assert all(said in text and "the pipeline is closed" in text for text in texts), texts


def reduces_in_eight_bits() -> str:
    over = mesh()
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float8_e4m3fn)
    layer = fully_shard(nn.Linear(8, 8), mesh=over["dp"], mp_policy=policy)
    pipe = Pipeline([layer], "1f1b", 1, nn.functional.mse_loss, group=over["pp"].get_group())
    x = torch.randn(4, 8)
    return caught(lambda: pipe.step(x, target=x))[1]


def test_what_gloo_does_not_take_is_not_a_lost_replica() -> None:
    with ranks(2) as group:
        for text in group.run(reduces_in_eight_bits):
            assert "stage 0 could not run a collective: RuntimeError: Invalid scalar type" in text, text


@on_ranks(2)
def test_replicas_are_not_built_over_a_group_that_has_failed() -> None:
    """Over Gloo it is closed, of which torch says that there is no backend."""
    over = mesh()
    with mock.patch.dict(DataParallel.broken, {over.get_group("dp"): "process 1 has exited"}):
        kind, text, _ = caught(lambda: build("fsdp", "1f1b", "auto", over))
    assert kind == "ValueError" and "after a failure (process 1 has exited); make a new group" in text, (kind, text)


def builds_without_a_replica() -> tuple[str, str]:
    over = mesh()
    if dist.get_rank() == 1:
        os._exit(1)
    made = [nn.Linear(2, 2)]
    kind, text, _ = caught(lambda: Pipeline(made, "gpipe", 1, group=over["pp"], data_parallel=over["dp"]))
    return kind, text


def test_a_replica_that_exits_while_pipelines_are_built_is_named() -> None:
    with ranks(2) as group:
        group.start(builds_without_a_replica)
        kind, text = group.results([0])[0]
    assert kind == "StepError" and "of the replicas of stage 0, process 1 has exited" in text, text


def builds_where_one_raises(name: str) -> tuple[str, str, int | None]:
    """Runs on every rank: what is raised where process 3 raises in the construction."""
    over = mesh()
    made = [nn.Linear(2, 2), nn.Linear(2, 2)]
    raises = mock.patch.object(construction, name, side_effect=ArithmeticError("on purpose"))
    with raises if dist.get_rank() == 3 else contextlib.nullcontext():
        return caught(lambda: Pipeline(made, "gpipe", 1, group=over["pp"], data_parallel=over["dp"]))


@pytest.mark.parametrize("name", ["build_stages", "compare_replicas"])
def test_a_replica_that_is_not_built_ends_the_construction_of_the_others(name: str) -> None:
    """They would wait for it in a constructor of DistributedDataParallel for half an hour, or until the timeout."""
    with ranks(4) as group:
        answers = group.run(builds_where_one_raises, name)
    assert answers[3] == ("ArithmeticError", "on purpose", None)
    assert answers[2] == ("StepError", "rank 1 could not build the pipeline: ArithmeticError: on purpose", 1)
    for kind, text, _ in answers[:2]:
        assert kind == "StepError" and "process 3, of another pipeline: ArithmeticError: on purpose" in text, text


def steps_over_a_closed_group() -> str:
    over = mesh()
    pipe = build("ddp", "1f1b", "auto", over)
    with mock.patch.dict(DataParallel.broken, {over.get_group("dp"): "process 1 has exited"}):
        return caught(lambda: step(pipe, 0, 0))[1]


def test_a_pipeline_whose_group_another_one_has_closed_says_why() -> None:
    with ranks(2) as group:  # which closes it, too
        for text in group.run(steps_over_a_closed_group):
            assert "could not reduce its gradients: process 1 has exited" in text, text


def normed() -> list[nn.Module]:
    return [nn.Sequential(block, nn.BatchNorm1d(WIDTH)) for block in layers()]


def only_one_steps(wrap: str, made: Callable[[], list[nn.Module]]) -> tuple[str, str]:
    over, replica = mesh_and_replica()
    pipe = build(wrap, "zbv", "auto", over, made=made, timeout=10.0)
    if replica == 1:
        return "", ""
    kind, text, _ = caught(lambda: step(pipe, 0, 0))
    again = caught(lambda: step(pipe, 0, 0))
    return kind, text + again[1]


@pytest.mark.parametrize(("wrap", "made"), [("ddp", layers), ("fsdp", layers), ("ddp", normed)])
def test_a_replica_that_does_not_come_is_named(wrap: str, made: Callable[[], list[nn.Module]]) -> None:
    """Also in the broadcast of BatchNorm's buffers, at the begin of the step."""
    with ranks(2) as group:
        kind, text = group.run(only_one_steps, wrap, made)[0]
    assert kind == "StepError"
    assert "another of the 2 replicas of stage 0, in the processes" in text
    assert text.count("build a new one") == 2


def only_one_reduces(how: str) -> tuple[str, str]:
    over, replica = mesh_and_replica()
    pipe = build("ddp", "zbv", "auto", over, timeout=10.0)
    x, target = batch(0, replica)
    found = "", ""
    if replica == 0:
        found = caught(lambda: pipe.step(x, target=target))[:2]
    elif how == "eval_step":
        pipe.eval_step(x, target=target)
    else:
        with pipe.no_sync():
            pipe.step(x, target=target)
    dist.barrier()
    return found


@pytest.mark.parametrize("how", ["no_sync", "eval_step"])
def test_a_replica_that_waits_for_others_says_what_they_may_do(how: str) -> None:
    with ranks(4) as group:
        for kind, text in group.run(only_one_reduces, how)[:2]:
            assert kind == "StepError" and re.search(
                r"of the 2 replicas of stage \d, in the processes \[\d, \d\], did not", text
            ), text
            assert how in text.partition("did not respond")[2], text


def not_called_alike(how: str, executor: str) -> str:
    over, replica = mesh_and_replica()
    pipe = build("fsdp", "zbv", executor, over)
    x, target = batch(0, replica)
    with pipe.no_sync() if replica and how == "no_sync" else contextlib.nullcontext():
        call = pipe.eval_step if replica and how == "eval_step" else pipe.step
        kind, text, _ = caught(lambda: call(x, target=target))
    assert kind == "StepError", (kind, text)
    check_next_step(pipe, replica)
    return text


@executors_in_turn("how", ["no_sync", "eval_step"])
def test_shards_whose_replicas_are_not_called_alike(how: str, executor: str, group_of: GroupOf) -> None:
    """Nobody waits, and the next step works."""
    for rank, text in enumerate(group_of(4).run(not_called_alike, how, executor)):
        assert re.search(r"the replicas of stage \d, in the processes \[\d, \d\], were not called alike", text), text
        called = {"no_sync": "step within no_sync", "eval_step": "eval_step"}[how] if rank >= 2 else "step"
        assert f"here for {called};" in text, text


def not_frozen_alike(executor: str) -> str:
    over, replica = mesh_and_replica()
    pipe = build("fsdp", "zbv", executor, over)
    weights = [p for name, p in pipe.named_parameters() if name.endswith(("norm.weight", "norm.bias")[replica])]
    for weight in weights:
        weight.requires_grad_(False)
    kind, text, _ = caught(lambda: step(pipe, 0, replica))
    assert kind == "StepError", (kind, text)
    for weight in weights:
        weight.requires_grad_(True)
    check_next_step(pipe, replica)
    return text


def test_shards_whose_replicas_train_different_parameters(executor: str, group_of: GroupOf) -> None:
    """Of one size: without a comparison one replica's gradient would be added to that of another parameter."""
    for rank, text in enumerate(group_of(4).run(not_frozen_alike, executor)):
        assert re.search(r"the replicas of stage \d, in the processes \[\d, \d\], do not train the same", text), text
        assert re.search(r"\(frozen here: \d\.norm\." + ("weight", "bias")[rank // 2], text), text


def only_one_clips() -> list[tuple[str, str]]:
    over, replica = mesh_and_replica()
    pipe = build("fsdp", "zbv", "auto", over, timeout=10.0)
    step(pipe, 0, replica)
    found = [] if replica else [caught(lambda: pipe.clip_grad_norm_(1.0))[:2] for _ in range(2)]
    dist.barrier()  # no replica is closed meanwhile
    return found


def test_a_replica_that_does_not_clip_is_named() -> None:
    with ranks(4) as group:
        for found in group.run(only_one_clips)[:2]:
            assert [kind for kind, _ in found] == ["StepError", "StepError"], found
            for _, text in found:
                assert "clip_grad_norm_ on every rank of all replicas" in text and "build a new one" in text, text


def another_number(wrap: str, executor: str) -> tuple[str, str]:
    over, replica = mesh_and_replica()
    pipe = build(wrap, "zbv", executor, over)
    x, target = batch(0, replica)
    kind, text, _ = caught(lambda: pipe.step(x, target=target, num_microbatches=(5, 8)[replica]))
    check_next_step(pipe, replica)
    return kind, text


@executors_in_turn("wrap", ["ddp", "fsdp"])
def test_another_number_of_microbatches_in_one_replica_is_refused(wrap: str, executor: str, group_of: GroupOf) -> None:
    for rank, (kind, text) in enumerate(group_of(4).run(another_number, wrap, executor)):
        assert kind == "StepError" and "num_microbatches: the replicas of stage " in text, text
        assert f"here with num_microbatches={5 if rank < 2 else 8}, on average with 6.5" in text


def collectives_alone() -> list[str]:
    """Rank 0: how two collectives are described that rank 1 does not join; the first one closes Gloo's connection."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    dist.all_reduce(torch.ones(1), group=group)
    texts = []
    while dist.get_rank() == 0 and len(texts) < 2:
        with pytest.raises(RuntimeError) as raised:
            dist.all_reduce(torch.ones(1), group=group)
        assert is_lost_connection(raised.value), raised.value
        texts.append(lost_text([1], raised.value))
    return texts


def test_every_timeout_of_gloo_is_known_as_one() -> None:
    with ranks(2) as group:
        texts, _ = group.run(collectives_alone)
    assert len(texts) == 2 and all("process 1 does not respond" in text for text in texts), texts
