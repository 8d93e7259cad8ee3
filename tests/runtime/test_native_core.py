"""The native executor against plain autograd, and what it must survive."""

from __future__ import annotations

import copy
import gc
import threading
import traceback
import weakref

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import fastpipe  # noqa: E402
from fastpipe.program import Op  # noqa: E402
from fastpipe.runtime import native  # noqa: E402
from fastpipe.runtime.stage.losses import StageWork  # noqa: E402
from tests.runtime.native_ranks import Call, NativeRanks, lowered, squares  # noqa: E402

pytestmark = [
    pytest.mark.skipif(native.load() is None, reason=native.native_status()),
]

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


@pytest.mark.parametrize("delay", [0.0, 0.001])
@pytest.mark.parametrize(
    ("name", "num_ranks", "num_stages"),
    [("gpipe", 1, 1), ("gpipe", 4, 4), ("1f1b", 2, 2), ("interleaved_1f1b", 2, 4), ("dualpipev", 2, 4), ("zbv", 2, 4)],
)
def test_loss_and_gradients_are_those_of_plain_autograd_bit_for_bit(name, num_ranks, num_stages, delay):
    check_equal(blocks(num_stages), lowered(name, num_ranks, MICROBATCHES), delay=delay)


def test_several_tensors_and_tensors_without_gradient_cross_a_boundary():
    def fork(x):
        return x.sin(), torch.arange(ROWS), x.t(), x.new_zeros(0, 4)

    def join(x, numbers, transposed, nothing):
        return x * numbers[:, None] + transposed.t() + nothing.sum()

    first, last = blocks(2)
    check_equal([first, fork, join, last], lowered("1f1b", 4, MICROBATCHES))


def test_what_is_not_dense_a_changed_input_and_an_unused_one():
    def wide(x):
        return x[:, ::2], x[:1].expand(ROWS, WIDTH), x

    def narrow(half, row, unused):
        return torch.cat([half, half], 1) + row

    def in_place(x):
        return x.mul_(2).relu_()

    first, last = blocks(2)
    check_equal([first, wide, narrow, in_place, last], lowered("gpipe", 5, MICROBATCHES))


def test_a_stage_may_return_its_input_or_a_view_of_it():
    first, last = blocks(2)
    check_equal([first, lambda x: x, lambda x: x.view(-1), lambda x: x.view(ROWS, WIDTH), last], lowered("1f1b", 5, 6))


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


def test_frozen_stages_pass_no_gradient_and_break_nothing():
    modules = blocks(4)
    for p in parameters(modules[:2]):
        p.requires_grad_(False)
    ranks = NativeRanks(modules, lowered("1f1b", 4, MICROBATCHES))
    inputs, targets = data()
    for step in range(2):
        ranks.step(inputs, targets, announce=step == 0)
    assert not ranks.errors
    assert all(p.grad is None for p in parameters(modules[:2]))
    assert all(p.grad is not None for p in parameters(modules[2:]))


def test_given_output_gradients_take_the_place_of_a_loss():
    modules, (inputs, targets) = blocks(2), data()
    reference = copy.deepcopy(modules)
    for (value,), grad in zip(inputs, targets, strict=True):
        reference[1](reference[0](value)).backward(grad)
    ranks = NativeRanks(modules, lowered("1f1b", 2, MICROBATCHES), loss_fn=None)
    ranks.step(inputs, None, announce=True, output_grads=[(grad,) for grad in targets])
    assert not ranks.errors
    for one, other in zip(parameters(modules), parameters(reference), strict=True):
        assert torch.equal(one.grad, other.grad)


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


def test_autocast_is_that_of_the_calling_thread():
    seen = []

    def look(x):
        seen.append((x @ x.t()).dtype)
        return x

    first, last = blocks(2)
    ranks = NativeRanks([first, look, last], lowered("1f1b", 3, 2))
    ranks.step(*data(2), announce=True, mode=lambda: torch.autocast("cpu", dtype=torch.bfloat16))
    assert not ranks.errors
    assert seen == [torch.bfloat16] * 2


def test_the_state_of_one_thread_can_be_given_to_a_run_in_another():
    seen = []
    look = Call(lambda x: (seen.append(torch.is_inference_mode_enabled()), x)[1])
    ranks = NativeRanks([look], forward_only(lowered("gpipe", 1, 1)))
    stage, executor = ranks.stages[0], ranks.executors[0]
    stage.begin(StageWork(args=[(torch.ones(ROWS, WIDTH),)], targets=[torch.ones(ROWS, WIDTH)]))
    with torch.inference_mode():
        state = native.load().ThreadState()
    arguments = (1, True, [(stage.run, None, None, None, None, None, (), -1, None, (0, (0, 0, 0)))], print)
    thread = threading.Thread(target=lambda: executor._native.run(*arguments, state=state))
    thread.start()
    thread.join()
    with torch.no_grad():
        executor._native.run(*arguments)
    assert seen == [True, False]


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
    @pytest.mark.parametrize("announce", [True, False])
    @pytest.mark.parametrize("position", range(4))
    def test_an_exception_arrives_as_itself_and_the_next_step_works(self, position, announce):
        trouble = KeyError("mine")
        armed = [False]

        def maybe_fail(x):
            if armed[0]:
                raise trouble
            return x

        modules = blocks(4)
        modules[position] = nn.Sequential(modules[position], Call(maybe_fail))
        ranks = NativeRanks(modules, lowered("1f1b", 4, MICROBATCHES))
        inputs, targets = data()
        if not announce:
            ranks.step(inputs, targets, announce=True)
        armed[0] = True
        ranks.step(inputs, targets, announce=announce)
        assert ranks.drained_but(position) is trouble
        assert "maybe_fail" in "".join(traceback.format_tb(trouble.__traceback__))
        [(at, reported)] = ranks.reports[position]
        assert reported is trouble
        assert ranks.program[position][at].op is Op.F
        armed[0] = False
        for p in parameters(modules):
            p.grad = None
        reference = copy.deepcopy(modules)
        expected = unsplit(reference, inputs, targets, steps=1)
        losses = ranks.step(inputs, targets, announce=announce)
        assert not ranks.errors
        assert all(torch.equal(one, other) for one, other in zip(losses, expected, strict=True))

    @pytest.mark.parametrize("where", ["function", "hook"])
    def test_an_exception_inside_backward_arrives_as_itself(self, where):
        trouble = ZeroDivisionError("in backward")

        class Broken(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, grad):
                raise trouble

        def fail(x):
            if where == "function":
                return Broken.apply(x)
            y = x.clone()
            y.register_hook(lambda grad: (_ for _ in ()).throw(trouble))
            return y

        first, last = blocks(2)
        ranks = NativeRanks([first, fail, last], lowered("1f1b", 3, MICROBATCHES))
        ranks.step(*data(), announce=True)
        assert ranks.drained_but(1) is trouble
        assert trouble.__traceback__ is not None

    def test_torchs_own_errors_are_one_line(self):
        first, last = blocks(2)
        ranks = NativeRanks([first, lambda x: (x.sigmoid_(), x.tanh_())[1], last], lowered("1f1b", 3, 2))
        ranks.step(*data(2), announce=True)
        error = ranks.drained_but(1)
        assert type(error) is RuntimeError
        assert "modified by an inplace operation" in str(error)
        assert "\n" not in str(error)

    def test_a_changed_output_is_refused_by_name(self):
        armed = [False]
        first, last = blocks(2)
        ranks = NativeRanks([first, lambda x: x[:1] if armed[0] else x, last], lowered("1f1b", 3, 2))
        ranks.step(*data(2), announce=True)
        armed[0] = True
        ranks.step(*data(2), announce=False)
        error = ranks.drained_but(1)
        assert type(error) is ValueError
        assert "stage 1, microbatch 0" in str(error)
        assert "(3, 8)" in str(error) and "(1, 8)" in str(error)
        armed[0] = False
        ranks.step(*data(2), announce=False)
        assert not ranks.errors

    def test_a_failure_elsewhere_drains(self):
        ranks = NativeRanks(blocks(2), lowered("1f1b", 2, MICROBATCHES))
        stop = [False]
        ranks.stages[0].module.register_forward_pre_hook(lambda *_: ranks.executors[0].fail() if stop[0] else None)
        ranks.step(*data(), announce=True)
        stop[0] = True
        ranks.step(*data(), announce=False)
        assert not ranks.errors and list(ranks.spans.values()) == [None, None]
        assert ranks.reports == {0: [], 1: []}

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
        hub = runtime.over_loopback([tuple(map(int, c)) for c in program.channels], [0, 1], 0.0)
        channels = [tuple(map(int, c)) for c in program.channels]
        with pytest.raises(ValueError, match="stage 1 is not on this rank"):
            runtime.Executor(1, columns, channels, [(0, True, False, False)], hub, 1.0)
        columns[0, 0] = 99
        with pytest.raises(ValueError, match="no operation number 99"):
            runtime.Executor(1, columns, channels, [(1, False, True, False)], hub, 1.0)
        del ranks


class TestLifetime:
    def test_nothing_outlives_a_step(self):
        alive = weakref.WeakSet()

        def watch(x):
            y = x * 2
            alive.update([x, y])
            return y

        first, last = blocks(2)
        ranks = NativeRanks([first, watch, last], lowered("1f1b", 3, MICROBATCHES))
        for step in range(3):
            ranks.step(*data(), announce=step == 0)
            assert not ranks.errors
        gc.collect()
        assert not list(alive)

    def test_nothing_outlives_a_failed_step(self):
        alive = weakref.WeakSet()
        calls = []

        def watch(x):
            calls.append(1)
            y = x * 2
            alive.update([x, y])
            if len(calls) == 4:
                raise ValueError("enough")
            return y

        first, last = blocks(2)
        ranks = NativeRanks([first, watch, last], lowered("1f1b", 3, MICROBATCHES))
        ranks.step(*data(), announce=True)
        assert isinstance(ranks.drained_but(1), ValueError)
        # the traceback holds the frame's variables
        ranks.errors.clear()
        ranks.reports.clear()
        gc.collect()
        assert not list(alive)

    def test_the_executor_and_its_stages_are_collected(self):
        ranks = NativeRanks(blocks(2), lowered("1f1b", 2, 2))
        ranks.step(*data(2), announce=True)
        gone = [weakref.ref(ranks), weakref.ref(ranks.executors[0]), weakref.ref(ranks.stages[0].module)]
        del ranks
        gc.collect()
        assert [ref() for ref in gone] == [None] * 3


def test_actions_are_labelled_for_the_profiler():
    modules = blocks(1)
    ranks = NativeRanks(modules, lowered("gpipe", 1, 2))
    inputs, targets = data(2)
    executor = ranks.executors[0]
    ranks.step(inputs, targets, announce=True)
    for stage in ranks.stages:
        stage.begin(type(stage.work)(args=inputs, targets=targets))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        executor.run(1, False)
    assert {"PP:0F0", "PP:0F1", "PP:0B0", "PP:0B1"} <= {event.name for event in profile.events()}


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
