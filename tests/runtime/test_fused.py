"""Pairs by the modules' own method, as one would write it for DualPipe; the bits are the same."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from fastpipe.runtime.stage.stage import Chain
from fastpipe.testing import reference_step
from tests.runtime.checks import same_bits, unequal
from tests.runtime.paired import PAIRED, Layer, Own, batch, compare, layers_of, make, model_of, num_stages


@pytest.mark.parametrize("schedule", PAIRED)
def test_the_modules_own_method(schedule: str, executor: str) -> None:
    count = num_stages(schedule, 2)
    pipe = make(layers_of(Own, count), schedule, executor)
    Own.calls = 0
    compare(pipe, layers_of(Layer, count))
    pairs = sum(bool(action.pair_stage >= 0) for rank in pipe.schedule for action in rank)
    assert Own.calls == 3 * pairs == pipe._steps.ranks.pair_counts()["fused"] > 0


@pytest.mark.parametrize(("reduction", "rng"), [("mean", "per_microbatch"), ("sum", None)])
def test_the_method_with_everything_else(reduction: str, rng: str | None, executor: str) -> None:
    """Dropout, checkpoints, weights of rows, and ranks that are threads."""
    p = 0.3 if rng else 0.0
    pipe = make(layers_of(lambda: Own(p, recomputes=True), 4), "dualpipev", executor, rng=rng, loss_reduction=reduction)
    unsplit = layers_of(lambda: Layer(p), 4)
    for step in range(2):
        x, y = batch(step)
        result = pipe.step(x, target=y)
        options = {"rng": rng, "seed": 5, "step_count": step} if rng else {}
        reference = reference_step(
            unsplit, (x, y), pipe.schedule, nn.functional.mse_loss, loss_reduction=reduction, **options
        )
        assert result.loss is not None and same_bits(result.loss, reference.loss)
        assert not unequal(pipe, Chain(dict(enumerate(unsplit))))
    assert pipe._steps.ranks.pair_counts()["fused"] > 0


def test_output_gradients_instead_of_a_loss(executor: str) -> None:
    pipes = [make(layers_of(kind, 4), "dualpipev", executor, loss_fn=None) for kind in (Own, Layer)]
    x, y = batch()
    for pipe in pipes:
        pipe.step(x, output_grad=y)
    assert not unequal(pipes[0], model_of(pipes[1]))
    assert pipes[0]._steps.ranks.pair_counts()["fused"] > 0


def test_a_chain_of_layers_is_no_module_of_its_own(executor: str) -> None:
    pipe = make(layers_of(Own, 8), "dualpipev", executor)
    Own.calls = 0
    compare(pipe, layers_of(Layer, 8), steps=1)
    assert Own.calls == 0 and "overlapped_forward_backward" not in pipe.describe()


def bad(returned: Callable[[Any, Any], Any], backward: bool = True) -> type[nn.Module]:
    """A layer whose method returns something else, or runs no backward."""

    class Bad(Own):
        @classmethod
        def overlapped_forward_backward(cls, *args: Any) -> Any:
            *given, loss1, outputs1, grads1 = args
            if backward:
                return returned(*super().overlapped_forward_backward(*args))
            module0, inputs0, criterion0, labels0, _ = given
            output = module0(*inputs0)
            return [output], None if criterion0 is None else criterion0(output, *labels0)

    return Bad


class Twice(Own):
    """A layer whose method computes the loss twice."""

    @classmethod
    def overlapped_forward_backward(cls, module0: Any, inputs0: Any, criterion0: Any, *rest: Any) -> Any:
        twice = criterion0 and (lambda *values: criterion0(*values) + criterion0(*values))
        return super().overlapped_forward_backward(module0, inputs0, twice, *rest)


def test_a_method_that_computes_the_loss_twice(executor: str) -> None:
    x, y = batch()
    with pytest.raises(ValueError, match="overlapped_forward_backward of stage 3 called its criterion twice: call it"):
        make(layers_of(Twice, 4), "dualpipev", executor).step(x, target=y)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda outputs, loss: None, r"returned a NoneType: return \(outputs0, loss0\)"),
        (lambda outputs, loss: (outputs, loss, loss), r"returned a tuple of 3"),
        (lambda outputs, loss: (None, loss), "returned a NoneType for outputs0"),
        (lambda outputs, loss: (outputs * 2, loss), "returned 2 outputs, and the forward of the stage 1"),
        (lambda outputs, loss: ([o.detach() for o in outputs], loss), "returned outputs without a graph"),
        (lambda outputs, loss: (outputs, outputs[0].sum() if loss is None else loss), "criterion0 was None"),
        (lambda outputs, loss: (outputs, None), "another loss0 than criterion0 gave"),
        (lambda outputs, loss: (outputs, loss if loss is None else 2 * loss), "another loss0 than criterion0 gave"),
        (None, "did not run the backward"),
    ],
)
def test_what_a_method_does_wrong(returned: Any, message: str, executor: str) -> None:
    kind = bad(returned) if returned else bad(lambda outputs, loss: None, backward=False)
    pipe = make(layers_of(kind, 4), "dualpipev", executor)
    x, y = batch()
    with pytest.raises(ValueError, match=message) as caught:
        pipe.step(x, target=y)
    assert "overlapped_forward_backward of stage" in str(caught.value)
    assert any("OVERLAP_F_B" in note for note in caught.value.__notes__)
