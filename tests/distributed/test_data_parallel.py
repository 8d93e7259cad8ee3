"""Replicas of a pipeline: a mesh of 2 x 2 processes against the unsplit model, to the last bit."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import fastpipe
from fastpipe import Pipeline
from fastpipe.runtime.stage import stage as stage_module
from tests.conftest import BOTH
from tests.distributed.meshes import (
    Reference,
    batch,
    build,
    layers,
    mesh_and_replica,
    squared,
    step,
    two_steps,
    whole_grad,
    wrong_gradients,
)
from tests.distributed.ranks import GroupOf, on_ranks
from tests.runtime.checks import same_bits

SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "gpipe": {"reverse_backward": True},
    "interleaved_zb": {},
    "zbv": {},
    "dualpipev": {},
}


# Of wrapper, executor and schedule each two meet: an executor begins a reduction alike whatever it is that reduces.
TOGETHER = {
    ("ddp", "native"): list(SCHEDULES),
    ("fsdp", "python"): ["1f1b", "interleaved_zb", "dualpipev"],
    ("ddp", "python"): ["zbv"],
    ("fsdp", "native"): ["gpipe", "zbv"],
}


@BOTH
@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
@on_ranks(4)
def test_gradients_are_the_mean_of_both_replicas(wrap: str, executor: str) -> None:
    """Several schedules: a step, another that adds to it, and two under one reduction."""
    over, replica = mesh_and_replica()
    for name in TOGETHER[wrap, executor]:
        pipe = build(wrap, name, executor, over, schedule_options=SCHEDULES[name])
        wrong = two_steps(pipe, wrap, replica)
        wrong.append(accumulate(pipe, replica))
        assert wrong == [[], [], []], name


def accumulate(pipe: Pipeline, replica: int) -> list[str]:
    """A step that reduces nothing, and one that reduces what both added."""
    for parameter in pipe.parameters():
        parameter.grad = None
    reference = Reference(pipe)
    with pipe.no_sync():
        step(pipe, 2, replica)
    reference.step(2, reduces=False)
    pipe.eval_step(batch(0, replica)[0])
    step(pipe, 3, replica)
    reference.step(3)
    return wrong_gradients(pipe, reference)


@on_ranks(4)
def test_the_comparison_finds_a_wrapper_that_is_left_alone(executor: str) -> None:
    """With the wrapper's own hooks the gradients of Linears are off."""
    over, replica = mesh_and_replica()
    found, stage_module.find_data_parallel = stage_module.find_data_parallel, lambda module, index: None
    try:
        pipe = build("fsdp", "zbv", executor, over)
        step(pipe, 0, replica)
    finally:
        stage_module.find_data_parallel = found
    reference = Reference(pipe)
    reference.step(0)
    gaps = [0.0]
    for name, parameter in pipe.named_parameters():
        expected, grad = reference.grad(name), whole_grad(parameter)
        if name.endswith("linear.weight") and expected is not None:
            gaps.append(1.0 if grad is None else float((grad - expected).norm() / expected.norm()))
    assert max(gaps) > 0.05


@on_ranks(4)
def test_two_holders_and_their_replicas(executor: str) -> None:
    """DDP where every stage is held twice: the mean of each half, and then their sum."""
    over, replica = mesh_and_replica()
    pipe = build("ddp", "dualpipe", executor, over, num_microbatches=6)
    reference = Reference(pipe)
    for number in range(2):
        step(pipe, number, replica)
        reference.step(number)
    for name, parameter in pipe.named_parameters():
        expected = reference.grad(name)
        assert (parameter.grad is None) == (expected is None)
        if expected is not None:
            torch.testing.assert_close(parameter.grad, expected, rtol=1e-5, atol=1e-7)
            everywhere = [torch.empty_like(expected) for _ in range(4)]
            torch.distributed.all_gather(everywhere, parameter.grad)
            assert all(same_bits(grad, parameter.grad) for grad in everywhere)
    with pytest.raises(ValueError, match="no_sync: dualpipe holds every stage twice"), pipe.no_sync():
        pass
    with pytest.raises(ValueError, match=r"fully_shard .* two ranks.*'dualpipev'"):
        build("fsdp", "dualpipe", executor, over, num_microbatches=6)


def by_argument(executor: str) -> list[str]:
    """A list of layers and ``data_parallel=``: nothing is wrapped by hand, and the keys are the model's."""
    over, replica = mesh_and_replica()
    pipe = Pipeline(
        layers(), "zbv", 5, squared, group=over["pp"], data_parallel=over["dp"], executor=executor, transport="auto"
    )
    reference = Reference(pipe)
    result = pipe.step(batch(0, replica)[0], target=batch(0, replica)[1], trace=True)
    reference.step(0)
    assert not wrong_gradients(pipe, reference)
    assert "REDUCE_GRAD" in str(result.timeline.program[0])
    pipe.load_state_dict(reference.models[0].state_dict())
    model = dict(reference.models[0].named_parameters())
    assert all(same_bits(value, model[key]) for key, value in pipe.state_dict().items())
    own = fastpipe.check_parity(pipe, layers(), batch(5, replica))
    assert own.ok, own
    text = pipe.describe()
    assert "in DistributedDataParallel over 2 replicas: stages" in text and "REDUCE_GRAD" in text
    norm = pipe.clip_grad_norm_(0.1)
    assert same_bits(norm, torch.nn.utils.clip_grad_norm_(reference.models[0].parameters(), 0.1))
    assert pipe.profile(batch(1, replica)[0], target=batch(1, replica)[1]).forward is not None
    return list(pipe.state_dict())


def test_data_parallel_by_argument(executor: str, group_of: GroupOf) -> None:
    answers = group_of(4).run(by_argument, executor)
    assert answers[0] == answers[2] and answers[1] == answers[3]
    keys = fastpipe.runtime.stage.stage.Chain(dict(enumerate(layers()))).state_dict()
    assert sorted(answers[0] + answers[1]) == sorted(keys)


@on_ranks(4)
def test_shards_are_trained(executor: str) -> None:
    """An optimizer sees shards, after every kind of step, and trains both replicas alike."""
    over, replica = mesh_and_replica()
    pipe = build("fsdp", "interleaved_zb", executor, over)
    optimizer = torch.optim.SGD(list(pipe.parameters()), 0.1)
    for number in range(2):
        pipe.eval_step(batch(number, replica)[0])
        assert all(isinstance(parameter, DTensor) for parameter in pipe.parameters())
        step(pipe, number, replica)
        optimizer.step()
        optimizer.zero_grad()
    reference = Reference(pipe)
    for number in range(2):
        reference.step(number)
        for model in reference.models:
            torch.optim.SGD(model.parameters(), 0.1).step()
            model.zero_grad()
    expected = dict(reference.models[0].named_parameters())
    for name, parameter in pipe.named_parameters():
        assert same_bits(parameter.full_tensor(), expected[name])
    reference.models[0].zero_grad()
    own = fastpipe.check_parity(pipe, reference.models[0], batch(5, replica))
    assert own.ok, own
    text = pipe.describe()
    assert "sharded by fully_shard over 2 replicas" in text
    assert re.search(r"split: gradients of [1-9]\d* of \d+ parameters in W; in I .*norm.weight", text), text


@on_ranks(4)
def test_the_page_about_it_runs_as_it_stands() -> None:
    page = Path(fastpipe.__file__).parents[1] / "docs/data-parallel.md"
    (code,) = re.findall(r"^```python\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    exec(compile(code, page, "exec"), {})
