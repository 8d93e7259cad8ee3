"""The native executor against plain autograd, and what it must survive."""

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import fastpipe  # noqa: E402
from fastpipe.program import Op  # noqa: E402
from fastpipe.runtime import native  # noqa: E402
from tests.runtime.native_ranks import NativeRanks, lowered, squares  # noqa: E402

pytestmark = [pytest.mark.skipif(native.load() is None, reason=native.native_status())]

ROWS, WIDTH, MICROBATCHES = 3, 8, 6


class Block(nn.Module):
    """Layers whose gradients need their order of summation, and a change in place of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


def blocks(count):
    torch.manual_seed(0)
    return [Block() for _ in range(count)]


def data(num_microbatches=MICROBATCHES, requires_grad=False):
    generator = torch.Generator().manual_seed(1)
    inputs = [(torch.randn(ROWS, WIDTH, generator=generator),) for _ in range(num_microbatches)]
    return inputs, [torch.randn(ROWS, WIDTH, generator=generator) for _ in range(num_microbatches)]


def unsplit(modules, inputs, targets, steps, order=None):
    """The gradients and losses of the whole model, one microbatch after the other."""
    losses = []
    for _ in range(steps):
        losses = []
        for microbatch in order or range(len(inputs)):
            value = inputs[microbatch]
            for module in modules:
                value = module(*value)
                value = value if isinstance(value, tuple) else (value,)
            loss = squares(*value, targets[microbatch])
            loss.backward()
            losses.append(loss.detach())
    return losses


def parameters(modules):
    return [p for module in modules if isinstance(module, nn.Module) for p in module.parameters()]


def check_equal(modules, program, **options):
    reference = copy.deepcopy(modules)
    inputs, targets = data(program.num_microbatches)
    expected = unsplit(reference, inputs, targets, steps=3)
    ranks = NativeRanks(modules, program, **options)
    for step in range(3):
        losses = ranks.step(inputs, targets, announce=step == 0)
        assert not ranks.errors
    assert all(torch.equal(one, other) for one, other in zip(losses, expected, strict=True))
    for one, other in zip(parameters(modules), parameters(reference), strict=True):
        assert torch.equal(one.grad, other.grad)
    return ranks


def test_what_a_stage_keeps_is_not_overwritten():
    kept = []

    def keep(x):
        kept.append((x, x.clone()))
        return x

    first, last = blocks(2)
    check_equal([first, keep, last], lowered("1f1b", 3, MICROBATCHES))
    assert all(torch.equal(one, copied) for one, copied in kept)


def test_a_receive_slot_is_reused_when_nobody_holds_it():
    places = []
    first, last = blocks(2)
    ranks = NativeRanks([first, lambda x: (places.append(x.data_ptr()), last(x))[1]], lowered("1f1b", 2, MICROBATCHES))
    inputs, targets = data()
    for step in range(4):
        ranks.step(inputs, targets, announce=step == 0)
    assert len(set(places)) <= ranks.program[1].num_slots
    assert all(place % 64 == 0 for place in places)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_grad_mode_is_that_of_the_calling_thread(mode):
    seen = []

    def look(x):
        seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), x.requires_grad))
        return x

    first, last = blocks(2)
    ranks = NativeRanks([first, look, last], forward_only(lowered("1f1b", 3, 2)))
    ranks.step(*data(2), announce=True, mode=mode)
    assert not ranks.errors
    grad = mode is torch.enable_grad
    assert seen == [(grad, mode is torch.inference_mode, grad)] * 2


def test_memory_filled_under_inference_mode_serves_autograd_later():
    ranks = NativeRanks(blocks(2), forward_only(lowered("1f1b", 2, 2)))
    for mode in (torch.inference_mode, torch.enable_grad):
        ranks.step(*data(2), announce=True, mode=mode)
        assert not ranks.errors


def forward_only(program):
    orders = [[item.action for item in rank if item.op is Op.F] for rank in program]
    schedule = fastpipe.Schedule.from_actions("forward", program.placement, program.num_microbatches, orders)
    return fastpipe.lower(schedule)


def test_spans_lie_one_after_the_other_and_a_send_ends_when_it_is_complete():
    delay = 0.02
    ranks = NativeRanks(blocks(2), lowered("1f1b", 2, 2), delay=delay)
    inputs, targets = data(2)
    ranks.step(inputs, targets, announce=True)
    for rank, (start, end) in ranks.spans.items():
        assert start.dtype == end.dtype == np.float64
        assert (end >= start).all()
        assert (start[1:] >= start[:-1]).all()
        sends = ranks.program[rank].columns[0] == Op.SEND
        assert (end[sends] - start[sends] >= delay).all()


class TestFailure:
    def test_torchs_own_errors_are_one_line(self):
        first, last = blocks(2)
        ranks = NativeRanks([first, lambda x: (x.sigmoid_(), x.tanh_())[1], last], lowered("1f1b", 3, 2))
        ranks.step(*data(2), announce=True)
        error = ranks.drained_but(1)
        assert type(error) is RuntimeError
        assert "modified by an inplace operation" in str(error)
        assert "\n" not in str(error)

    def test_lanes_in_which_the_program_deadlocks_are_found_at_once(self):
        ranks = NativeRanks(blocks(4), lowered("dualpipev", 2, 4), lanes="pair")
        ranks.step(*data(4), announce=True)
        assert any("deadlock" in str(error) for error in ranks.errors.values())
        ranks.step(*data(4), announce=True)
        assert all("build the Pipeline again" in str(error) for error in ranks.errors.values())

    def test_bad_programs_and_stages_are_refused_by_name(self):
        program = lowered("1f1b", 2, 2)
        ranks = NativeRanks(blocks(2), program)
        columns = program[1].columns.copy()
        runtime = native.load()
        channels = program.channels
        hub = runtime.over_loopback(channels, [0, 1], 0.0)
        with pytest.raises(ValueError, match="stage 1 is not on this rank"):
            runtime.Executor(1, columns, channels, [(0, True, False, False)], hub, 1.0)
        columns[0, 0] = 99
        with pytest.raises(ValueError, match="no operation number 99"):
            runtime.Executor(1, columns, channels, [(1, False, True, False)], hub, 1.0)
        del ranks


def test_one_executor_runs_one_step_at_a_time():
    ranks = NativeRanks(blocks(1), lowered("gpipe", 1, 1))
    inside = []

    def again(*_):
        with pytest.raises(RuntimeError, match="running a step already"):
            ranks.executors[0].run(1, True)
        inside.append(True)

    ranks.stages[0].module.register_forward_pre_hook(again)
    ranks.step(*data(1), announce=True)
    assert inside and not ranks.errors
