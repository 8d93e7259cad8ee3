"""Random schedules and random stages: both executors and the unsplit model agree to the last bit."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from fastpipe import Pipeline, Placement, Schedule, StepResult
from fastpipe.runtime.stage.stage import Chain
from fastpipe.testing import Loopback, reference_step
from tests.conftest import overlap_of, skip_without_native
from tests.patience import PATIENCE
from tests.runtime.checks import assert_same, same_bits
from tests.runtime.models import squared
from tests.runtime.random_modules import Drawn, random_stages, twins
from tests.runtime.split_models import WIDTH
from tests.unit.planning import random_schedules

FEW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
HOW = st.fixed_dictionaries(
    {
        "recv_lookahead": st.sampled_from([0, 1, 3, "all"]),
        "overlap": st.sampled_from(["always", "never"]),
        "recompute": st.sampled_from(["none", "none", "full"]),
    }
)
DELAYS = st.sampled_from([0.0, 0.0, 0.0005])


def train(stages: list[nn.Module], schedule: Schedule, executor: str, delay: float, how: Any) -> list[Any]:
    """Two steps that accumulate, over a loopback that may delay; the pipeline and their results."""
    how = {**how, "transport": Loopback(delay=delay), "timeout": PATIENCE}
    if how.get("overlap") == "always":
        how["overlap"] = overlap_of(executor)
    pipe = Pipeline(dict(enumerate(stages)), schedule, loss_fn=squared, executor=executor, **how)
    return [pipe, [pipe.step(x, target=y) for x, y in batches(schedule.num_microbatches)]]


def batches(num_microbatches: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Two batches of one shape: the first is announced. Their microbatches are not equally long."""
    generator = torch.Generator().manual_seed(5)
    rows = 2 * num_microbatches + 1
    x, y = (torch.randn(2, rows, WIDTH, generator=generator) for _ in "xy")
    return list(zip(x, y, strict=True))


@st.composite
def cases(draw: st.DrawFn, *, in_order: bool) -> tuple[Schedule, list[nn.Module], float, Any]:
    """What `train` takes, but for the executor."""
    schedule = draw(random_schedules(pairs=True, in_order=in_order))
    return schedule, draw(random_stages(schedule.num_stages)), draw(DELAYS), draw(HOW)


@FEW
@given(cases(in_order=True))
def test_the_unsplit_model(case: tuple[Schedule, list[nn.Module], float, Any]) -> None:
    """Where all stages sum the microbatches in one order, which is what the reference follows."""
    skip_without_native()
    schedule, stages, delay, how = case
    for executor in ("native", "python"):
        unsplit = Chain(dict(enumerate(twins(stages))))
        pipe, results = train(twins(stages), schedule, executor, delay, how)
        for result, batch in zip(results, batches(schedule.num_microbatches), strict=True):
            reference = reference_step(unsplit, batch, schedule, loss_fn=squared)
            assert same_bits(result.loss, reference.loss)
        assert_same(pipe, result, unsplit, reference)


@pytest.mark.filterwarnings("ignore:.*come in another order than stage 0's:UserWarning")
@FEW
@given(cases(in_order=False))
def test_one_executor_and_the_other(case: tuple[Schedule, list[nn.Module], float, Any]) -> None:
    """Whatever the order of every stage."""
    skip_without_native()
    schedule, stages, delay, how = case
    (one, its_results), (other, other_results) = (
        train(twins(stages), schedule, executor, delay, how) for executor in ("native", "python")
    )
    for a, b in zip(its_results, other_results, strict=True):
        assert all(map(same_bits, a.losses, b.losses))
    for (name, p), (_, q) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or same_bits(p.grad, q.grad), name
    assert tensors(its_results[-1]) == tensors(other_results[-1])


def tensors(result: StepResult) -> list[bytes]:
    """The outputs, to be compared by their bits."""
    outputs = result.outputs if isinstance(result.outputs, tuple) else (result.outputs,)
    return [output.contiguous().numpy().tobytes() for output in outputs]


def test_an_order_of_its_own_for_a_stage_differs_from_the_reference() -> None:
    """Equal bits mean something here, too: the second stage sums its microbatches backwards, which is said."""
    torch.manual_seed(2)
    stages: list[nn.Module] = [Drawn("mlp", "one"), Drawn("mlp", "one")]
    order = [f"{stage}F{i}" for stage in (0, 1) for i in range(4)] + [f"1B{i}" for i in (3, 2, 1, 0)]
    schedule = Schedule.from_actions("mine", Placement.custom([0, 0]), 4, [[*order, *(f"0B{i}" for i in range(4))]])
    unsplit = Chain(dict(enumerate(twins(stages))))
    with pytest.warns(UserWarning, match="stage 1: its B come in another order than stage 0's B"):
        pipe, _ = train(twins(stages), schedule, "python", 0.0, {})
    for batch in batches(4):
        reference_step(unsplit, batch, schedule, loss_fn=squared)
    pairs = list(zip((p for _, p in pipe.named_parameters()), unsplit.parameters(), strict=True))
    assert all(torch.allclose(p.grad, q.grad, atol=1e-6) for p, q in pairs)
    assert not all(same_bits(p.grad, q.grad) for p, q in pairs)
