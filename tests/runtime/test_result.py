"""What the processes tell each other of a step's losses comes back as it was."""

import json
import pickle
from functools import partial

import pytest
import torch

import fastpipe
from fastpipe.runtime.step.result import StepResult, Values, pack, packed_later, to_host, unpack

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def sent(tensors: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    values = unpack([json.loads(json.dumps(pack(to_host(as_losses(tensors)))))])
    return {i: loss for i, ((_, loss),) in values.get(1, {}).items()}


def as_losses(tensors: dict[int, torch.Tensor]) -> Values:
    """Of stage 1."""
    return {1: {i: [("loss", tensor)] for i, tensor in tensors.items()}}


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.reshape(1).view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_of_a_loss_arrives(dtype: torch.dtype) -> None:
    values = [1 / 3, -0.0, float("inf"), float("nan"), torch.finfo(dtype).tiny, 12345.678]
    losses = {2 * i: torch.tensor(value, dtype=dtype) for i, value in enumerate(values)}
    found = sent(losses)
    assert list(found) == list(losses)
    for microbatch, loss in losses.items():
        assert found[microbatch].dtype == dtype and found[microbatch].shape == ()
        assert bits(found[microbatch]) == bits(loss)


def test_losses_of_several_dtypes_keep_their_own() -> None:
    losses = {i: torch.tensor(i + 0.1, dtype=DTYPES[i % 3]) for i in (5, 0, 7, 3, 1)}
    found = sent(losses)
    assert sorted(found) == sorted(losses)
    assert all(found[i].dtype == loss.dtype and bits(found[i]) == bits(loss) for i, loss in losses.items())


def test_a_loss_may_have_come_with_a_graph_and_may_be_changed_afterwards() -> None:
    leaf = torch.tensor([2.0], requires_grad=True)
    found = sent({0: (3 * leaf).reshape(()), 1: leaf.detach().reshape(())})
    found[0].add_(1)
    assert [found[i].item() for i in (0, 1)] == [7.0, 2.0]
    assert not found[0].requires_grad


def test_no_losses_are_none() -> None:
    assert sent({}) == {}


def test_losses_of_several_ranks_are_put_in_order_when_they_are_read() -> None:
    """Two ranks hold the last stage of a bidirectional schedule: each says its half."""
    halves = [pack(to_host(as_losses({i: torch.tensor(float(i)) for i in part}))) for part in ((2, 3), (0, 1))]
    program = fastpipe.lower(fastpipe.make_schedule("gpipe", num_ranks=1, num_microbatches=4))
    parts = [partial(dict, losses=half) for half in halves]
    result = StepResult(parts, None, None, program, {})
    assert result.losses is not None and [loss.item() for loss in result.losses] == [0, 1, 2, 3]
    assert result.losses is result.losses and result.loss is not None and result.loss.item() == 6
    nothing = StepResult([], None, None, program, {})
    assert nothing.losses is None and nothing.loss is None and repr(nothing) == "<StepResult>"


def test_a_result_can_be_pickled() -> None:
    layers = [torch.nn.Linear(4, 4) for _ in range(4)]
    pipe = fastpipe.Pipeline(layers, "zbv", 4, torch.nn.functional.mse_loss, num_ranks=2)
    result = pipe.step(torch.randn(8, 4), target=torch.randn(8, 4), trace=True)
    again = pickle.loads(pickle.dumps(result))
    assert torch.equal(again.loss, result.loss) and torch.equal(again.outputs, result.outputs)
    assert again.timeline.makespan == result.timeline.makespan


class Event:
    """A device's that is done when it is waited for, or that has lost a peer."""

    def __init__(self, lost: bool) -> None:
        self.waits, self._lost = 0, lost

    def wait(self) -> None:
        self.waits += 1
        if self._lost:
            raise fastpipe.StepError("a message never came")


@pytest.mark.parametrize("lost", [False, True])
def test_what_a_device_computes_is_waited_for_when_it_is_read(lost: bool) -> None:
    event, losses = Event(lost), as_losses({0: torch.tensor(1.5), 1: torch.tensor(2.5)})
    outputs = packed_later({"losses": losses}, lambda: event)  # type: ignore[arg-type,return-value]
    program = fastpipe.lower(fastpipe.make_schedule("gpipe", num_ranks=1, num_microbatches=2))
    result = StepResult([outputs], None, None, program, {})
    assert event.waits == 0
    if lost:
        with pytest.raises(fastpipe.StepError, match="never came"):
            outputs()
        with pytest.raises(fastpipe.StepError, match="never came"):
            pickle.dumps(result)
        return
    again = pickle.loads(pickle.dumps(result))
    assert again.losses == result.losses == [1.5, 2.5] and event.waits == 1
    assert list(unpack([json.loads(json.dumps(outputs()["losses"]))])) == [1]
