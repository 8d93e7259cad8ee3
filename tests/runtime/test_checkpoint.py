"""Checkpoints: whoever saved, whoever loads goes on as if nothing had happened, to the last bit."""

import copy
import errno
import os
import pickle
import resource
import shutil
from argparse import Namespace
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from fastpipe import (
    MemoryCheckpoint,
    Pipeline,
    latest_checkpoint,
    load_checkpoint,
    load_safetensors,
    make_schedule,
    save_checkpoint,
)
from fastpipe.runtime import checkpoint
from fastpipe.runtime.stage.stage import Chain
from fastpipe.testing import reference_step
from tests.patience import PATIENCE
from tests.runtime.checks import same_bits
from tests.runtime.models import CASES, WIDTH, Block, squared

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
CASE = CASES["plain"]
COUNT = 8
Optimizer = torch.optim.Optimizer


def adamw(pipe: Any) -> Optimizer:
    """Two groups, cut through the stages."""
    named = list(pipe.named_parameters())
    groups = [
        {"params": [p for name, p in named if name.endswith("weight")], "weight_decay": 0.3},
        {"params": [p for name, p in named if not name.endswith("weight")], "lr": 0.02},
    ]
    return torch.optim.AdamW(groups, lr=0.01)


def momentum(pipe: Any) -> Optimizer:
    return torch.optim.SGD(list(pipe.parameters()), lr=0.1, momentum=0.9, nesterov=True)


def adagrad(pipe: Any) -> Optimizer:
    return torch.optim.Adagrad(list(pipe.parameters()), lr=0.1)


def pipeline(schedule: str, num_ranks: int | None, layers: list[nn.Module] | None = None, **options: Any) -> Pipeline:
    layers = CASE.layers(8) if layers is None else layers
    return Pipeline(layers, schedule, COUNT, squared, num_ranks=num_ranks, **options)


def go_on(step: Callable[[Any], Any], optimizers: Sequence[Any], steps: range) -> list[torch.Tensor]:
    """The losses of some steps of one long training."""
    losses = []
    for batch in CASE.batches(steps.stop, 17)[steps.start :]:
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses.append(step(batch).loss)
        for optimizer in optimizers:
            optimizer.step()
    return losses


def train(pipe: Pipeline, optimizer: Optimizer | Sequence[Optimizer], steps: range) -> list[torch.Tensor]:
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
    return go_on(lambda batch: pipe.step(*batch.args, target=batch.target), optimizers, steps)


def uninterrupted(make: Callable[[Any], Optimizer], steps: range, schedule: str = "1f1b") -> list[torch.Tensor]:
    """The losses of the unsplit model, from the first step."""
    model = Chain(dict(enumerate(CASE.layers(8))))
    optimizer = make(model)
    return train_unsplit(model, optimizer, range(steps.stop), schedule)[steps.start :]


def train_unsplit(model: nn.Module, optimizer: Optimizer, steps: range, schedule: str) -> list[torch.Tensor]:
    order = make_schedule(schedule, num_ranks=2, num_microbatches=COUNT)
    return go_on(lambda batch: reference_step(model, (batch.args, batch.target), order, squared), [optimizer], steps)


def all_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(map(same_bits, found, expected))


@pytest.mark.parametrize("make", [adamw, momentum, adagrad])
def test_training_goes_on_in_another_cut(make: Callable[[Any], Optimizer], executor: str, tmp_path: Path) -> None:
    """Four ranks with two stages each, then two ranks, then one: the losses of one unsplit training."""
    expected = uninterrupted(make, range(6))
    for number, (schedule, num_ranks) in enumerate([("dualpipev", 4), ("1f1b", 2), ("gpipe", 1)]):
        torch.manual_seed(number)
        layers = fresh() if number else CASE.layers(8)
        pipe = pipeline(schedule, num_ranks, layers, executor=executor)
        optimizer = make(pipe)
        if number:
            assert load_checkpoint(tmp_path / str(number - 1), pipe, optimizer) == {"step": 2 * number}
        steps = range(2 * number, 2 * number + 2)
        assert all_same(train(pipe, optimizer, steps), expected[steps.start : steps.stop])
        save_checkpoint(tmp_path / str(number), pipe, optimizer, extra={"step": steps.stop})


@pytest.mark.parametrize("how", ["disk", "memory"])
def test_optimizer_state_keeps_its_own_dtype(how: str, tmp_path: Path) -> None:
    """Momentum in fp32 of parameters in bf16; torch's load_state_dict rounds it to bf16."""
    case, found = CASES["bfloat16"], []
    batch = case.batches(1, 9)[0]
    pipes = [Pipeline(case.layers(4), "1f1b", 4, squared, num_ranks=2, grad_dtype=torch.float32) for _ in "ab"]
    for number, pipe in enumerate(pipes):
        optimizer = momentum(pipe)
        memory = MemoryCheckpoint(pipe, optimizer, name="test", folder=tmp_path) if how == "memory" else None
        if number:
            assert (memory.load() if memory else load_checkpoint(tmp_path / "disk", pipe, optimizer)) == 1
        for step in range(number, 3):
            pipe.step(*batch.args, target=batch.target)
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                memory.save(1) if memory else save_checkpoint(tmp_path / "disk", pipe, optimizer, extra=1)
        found.append([*pipe.state_dict().values()])
        del memory  # a second one of its name is refused
    assert all_same(*found)
    wide = Pipeline([layer.float() for layer in case.layers(4)], "1f1b", 4, squared, num_ranks=2)
    optimizer = torch.optim.AdamW(wide.parameters())
    x, y = (value.float() for value in (*batch.args, batch.target))
    wide.step(x, target=y)
    optimizer.step()
    save_checkpoint(tmp_path / "wide", wide, optimizer)
    optimizer = torch.optim.AdamW(pipes[0].parameters())
    load_checkpoint(tmp_path / "wide", pipes[0], optimizer)
    dtypes = {key: value.dtype for key, value in optimizer.state[next(pipes[0].parameters())].items()}
    assert dtypes == {"step": torch.float32, "exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16}


def fresh() -> list[nn.Module]:
    """The layers with other parameters."""
    layers = CASE.layers(8)
    with torch.no_grad():
        for layer in layers:
            for parameter in layer.parameters():
                parameter.normal_()
    return layers


@pytest.mark.parametrize("wrap", [pytest.param(lambda layer: layer, id="plain"), checkpoint_wrapper])
def test_the_plain_model_loads_and_saves(wrap: Callable[[nn.Module], nn.Module], tmp_path: Path) -> None:
    """No fastpipe on one side: DCP and torch's own functions for the state of an optimizer.

    Both know a parameter in torch's wrapper for activation checkpointing by the name that it has without it.
    """
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    expected = uninterrupted(adamw, range(6))
    pipe = pipeline("zbv", 2, list(map(wrap, CASE.layers(8))))
    optimizer = adamw(pipe)
    train(pipe, optimizer, range(2))
    save_checkpoint(tmp_path / "a", pipe, optimizer)

    model = Chain(dict(enumerate(fresh())))
    plain = adamw(model)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, plain, options=options)}
    dcp.load(state, checkpoint_id=tmp_path / "a", no_dist=True)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, plain, state["optimizer"], options=options)
    assert all_same(train_unsplit(model, plain, range(2, 4), "zbv"), expected[2:4])

    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, plain, options=options)}
    dcp.save({**state, "extra": (7,)}, checkpoint_id=tmp_path / "b", no_dist=True)
    pipe = pipeline("dualpipev", 4, list(map(wrap, fresh())))
    optimizer = adamw(pipe)
    assert load_checkpoint(tmp_path / "b", pipe, optimizer) == 7
    assert all_same(train(pipe, optimizer, range(4, 6)), expected[4:])

    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "c", no_dist=True)
    pipe = pipeline("1f1b", 2, fresh())
    assert load_checkpoint(tmp_path / "c", pipe) is None
    assert all(same_bits(value, model.state_dict()[key]) for key, value in pipe.state_dict().items())


class Counts(nn.Linear):
    """Has a state beside its tensors."""

    def __init__(self, extra: Any) -> None:
        super().__init__(WIDTH, WIDTH)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize(
    ("before", "after"),
    [({"n": 7, "of": {"t": 8}}, {"n": 1, "of": {"t": 2}}), ({}, {}), ((7,), (1,)), (7, 1)],
    ids=["dict", "empty", "tuple", "number"],
)
def test_the_extra_state_of_a_module(before: Any, after: Any, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a", pipeline("1f1b", 2, [Counts(copy.deepcopy(before)) for _ in range(12)]))
    layers = [Counts(copy.deepcopy(after)) for _ in range(12)]
    load_checkpoint(tmp_path / "a", pipeline("zbv", 3, layers))
    assert all(layer.extra == before for layer in layers)
    if before != after and isinstance(before, dict):
        with pytest.raises(KeyError, match="has no '0._extra_state.m', which the pipeline needs"):
            load_checkpoint(tmp_path / "a", pipeline("1f1b", 2, [Counts({"m": 7}) for _ in range(12)]))


class Scales(nn.Linear):
    """Multiplies by a buffer and by an extra state."""

    def __init__(self, scale: float) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("scale", torch.tensor(scale))
        self.extra = {"shift": scale}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale + self.extra["shift"]

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra.update(state)


@pytest.mark.parametrize("schedule", ["dualpipe", "1f1b"])
@pytest.mark.parametrize("how", ["checkpoint", "state", "assigned", "memory"])
def test_what_is_loaded_is_loaded_into_both_copies_of_a_stage(schedule: str, how: str, tmp_path: Path) -> None:
    saved = pipeline("dualpipe", 2, [Scales(0.5) for _ in range(4)])
    pipe = pipeline(schedule, 2, [Scales(2.0) for _ in range(4)])
    if how == "checkpoint":
        save_checkpoint(tmp_path / "a", saved)
        load_checkpoint(tmp_path / "a", pipe)
    elif how == "memory":
        MemoryCheckpoint(saved, name="a", folder=tmp_path).save()
        memory = MemoryCheckpoint(pipe, name="a", folder=tmp_path)
        memory.load()
        memory.close()
    else:
        pipe.load_state_dict(copy.deepcopy(saved.state_dict()), assign=how == "assigned")
    (batch,) = CASE.batches(1, 17)
    losses = [one.step(*batch.args, target=batch.target).loss for one in (pipe, saved)]
    assert torch.allclose(*losses, rtol=1e-6)


def test_what_is_written_reaches_both_copies_of_a_stage_with_the_next_load() -> None:
    """Buffers are each copy's own: without a load it stays in the first one."""
    layers = [Scales(1.0) for _ in range(4)]
    pipe = pipeline("dualpipe", 2, layers)
    for layer in layers:
        layer.scale.fill_(3.0)

    def found() -> list[float]:
        return sorted(float(value) for stage in pipe._steps.stages for value in stage.module.buffers())

    assert found() == [1.0] * 4 + [3.0] * 4
    pipe.load_state_dict(pipe.state_dict())
    assert found() == [3.0] * 8


def tied_late(wrap: Callable[[nn.Module], nn.Module] = lambda layer: layer) -> list[nn.Module]:
    """Twelve layers; the eleventh, whose name comes first in an alphabet, has a weight of the third."""
    layers = [wrap(layer) for layer in CASE.layers(12)]
    third, eleventh = (next(m for m in layers[i].modules() if isinstance(m, nn.Linear)) for i in (2, 10))
    eleventh.weight = third.weight
    return layers


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1)])
def test_a_tied_weight_has_the_name_that_torch_gives_it_in_every_cut(before: int, after: int, tmp_path: Path) -> None:
    plain = [name for name, _ in nn.Sequential(*tied_late()).named_parameters()]
    one, other = (pipeline("1f1b", count, tied_late()) for count in (before, after))
    assert [name for name, _ in one.named_parameters()] == [name for name, _ in other.named_parameters()] == plain
    train(one, optimizer := adamw(one), range(2))
    save_checkpoint(tmp_path / "a", one, optimizer)
    load_checkpoint(tmp_path / "a", other, loaded := adamw(other))
    expected = train(one, optimizer, range(2, 4))
    for found, loss in zip(train(other, loaded, range(2, 4)), expected, strict=True):
        torch.testing.assert_close(found, loss)


@pytest.mark.parametrize("how", ["checkpoint", "state", "assigned"])
def test_two_values_are_not_loaded_into_one_tied_weight(how: str, tmp_path: Path) -> None:
    """Both names are in every checkpoint, and read in any case: to compare them costs a copy of the weight."""
    weights = "2.linear.weight and 10.linear.weight"

    def load(pipe: Pipeline, saved: Pipeline) -> None:
        if how == "checkpoint":
            save_checkpoint(tmp_path, saved)
            return load_checkpoint(tmp_path, pipe)
        return pipe.load_state_dict(copy.deepcopy(saved.state_dict()), assign=how == "assigned")

    saved = pipeline("1f1b", 2, CASE.layers(12))
    tied, wrapped = pipeline("1f1b", 2, tied_late()), pipeline("1f1b", 2, tied_late(checkpoint_wrapper))
    for pipe in (tied, wrapped):
        with pytest.raises(ValueError, match=f"tied: {weights} are one weight .* two different values"):
            load(pipe, saved)
    # equal values are one value, also those that are equal to nothing
    state = saved.state_dict()
    state["2.linear.weight"].fill_(torch.nan)
    state["10.linear.weight"].fill_(torch.nan)
    load(tied, saved)
    assert all(same_bits(value, state[key]) for key, value in tied.state_dict().items())
    # the value of a tied weight is that of both
    load(saved, pipeline("1f1b", 2, tied_late()))
    assert same_bits(*(saved.state_dict()[f"{layer}.linear.weight"] for layer in (2, 10)))


def test_saving_in_the_background_takes_what_there_was(tmp_path: Path) -> None:
    pipe = pipeline("1f1b", 2)
    optimizer = momentum(pipe)
    train(pipe, optimizer, range(2))
    kept = copy.deepcopy(pipe.state_dict())
    writing = save_checkpoint(tmp_path / "a", pipe, optimizer, asynchronous=True)
    train(pipe, optimizer, range(2, 4))
    again = save_checkpoint(tmp_path / "b", pipe, optimizer, asynchronous=True)
    assert writing is not None and writing.done() and again is not None
    again.result()
    later = pipe.state_dict()
    other = pipeline("1f1b", 2, fresh())
    load_checkpoint(tmp_path / "a", other, their := momentum(other))
    assert all(same_bits(value, kept[key]) for key, value in other.state_dict().items())
    assert not all(same_bits(value, kept[key]) for key, value in later.items())
    assert all_same(train(other, their, range(2, 4)), uninterrupted(momentum, range(2, 4)))


def test_saving_in_the_background_resolves_views(tmp_path: Path) -> None:
    pipe, view = pipeline("1f1b", 2), torch.tensor([1 + 2j]).conj()
    writing = save_checkpoint(tmp_path, pipe, extra=[view, {"negated": view.imag}], asynchronous=True)
    assert writing is not None
    writing.result()
    assert load_checkpoint(tmp_path, pipe) == [torch.tensor([1 - 2j]), {"negated": torch.tensor([-2.0])}]


def test_the_model_alone(tmp_path: Path) -> None:
    pipe = pipeline("1f1b", 2)
    assert save_checkpoint(tmp_path, pipe) is None
    other = pipeline("dualpipe", 2, fresh())
    assert load_checkpoint(tmp_path, other) is None
    assert all(same_bits(a, b) for a, b in zip(pipe.parameters(), other.parameters(), strict=True))
    with pytest.raises(KeyError, match="no state of an optimizer for '0.linear.weight'"):
        load_checkpoint(tmp_path, other, momentum(other))


def test_the_options_and_arrays_of_a_script(tmp_path: Path) -> None:
    pipe = pipeline("1f1b", 2)
    extra = {
        "arguments": Namespace(lr=0.1, folder=tmp_path),
        "generator": np.random.default_rng(1).bit_generator.state,
        "best": np.float64(0.5),
        "words": (np.str_(""), b"", frozenset([1])),
    }
    arrays = {"losses": np.arange(3.0), "none": np.zeros((0, 2)), "mixed": np.array([1, "a"], dtype=object)}
    with torch.serialization.safe_globals([Namespace]):
        save_checkpoint(tmp_path, pipe, extra={**extra, **arrays})
        found = load_checkpoint(tmp_path, pipe)
        assert Namespace in torch.serialization.get_safe_globals()
    for name, array in arrays.items():
        value = found.pop(name)
        assert value.dtype == array.dtype and value.tolist() == array.tolist()
    assert found == extra and type(found["best"]) is np.float64


class Runs:
    """Its pickle makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("file", ["extra", "the optimizer", ".metadata"])
def test_what_a_checkpoint_names_is_not_called(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, runs = pipeline("1f1b", 2), Runs(tmp_path / "made")
    optimizer = momentum(pipe)
    optimizer.param_groups[0]["note"] = runs if file == "the optimizer" else None
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_check_loadable", lambda state: None)
        save_checkpoint(tmp_path / "a", pipe, optimizer, extra=runs if file == "extra" else None)
    if file == ".metadata":
        shutil.rmtree(tmp_path / "a")
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / file).write_bytes(pickle.dumps(runs))
    with pytest.raises(ValueError, match=r"posix.mkdir, which .*could execute code"):
        load_checkpoint(tmp_path / "a", pipe, optimizer)
    assert not runs.folder.exists()


def test_what_would_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    pipe, when = pipeline("1f1b", 2), [timedelta(1)]
    with pytest.raises(ValueError, match=r"^extra.* has datetime.timedelta, .*_globals\(\[datetime.timedelta\]"):
        save_checkpoint(tmp_path / "a", pipe, extra=when)
    assert not (tmp_path / "a").exists()
    with torch.serialization.safe_globals([timedelta]):
        save_checkpoint(tmp_path / "a", pipe, extra=when)
        assert load_checkpoint(tmp_path / "a", pipe) == when
    with pytest.raises(ValueError, match="^extra.* has datetime.timedelta"):
        load_checkpoint(tmp_path / "a", pipe)
    with pytest.raises(ValueError, match=r"^extra.* has what torch.load\(weights_only=True\) does not take, .*dicts$"):
        save_checkpoint(tmp_path / "b", pipe, extra={"count": 2**3000})


def test_several_optimizers_and_what_else_a_script_has(tmp_path: Path) -> None:
    """An optimizer a kind of parameter, a schedule of learning rates, and a parameter that never had a gradient."""

    def make(pipe: Pipeline) -> tuple[list[Optimizer], Any]:
        named = list(pipe.named_parameters())
        matrices = torch.optim.Adam([p for _, p in named if p.dim() == 2], lr=0.01)
        vectors = torch.optim.SGD([p for _, p in named if p.dim() == 1], lr=0.1, momentum=0.5)
        return [matrices, vectors], torch.optim.lr_scheduler.ExponentialLR(matrices, 0.5)

    def steps(pipe: Pipeline, optimizers: list[Optimizer], scheduler: Any, which: range) -> list[torch.Tensor]:
        losses = []
        for number in which:
            losses += train(pipe, optimizers, range(number, number + 1))
            scheduler.step()
        return losses

    pipe = pipeline("1f1b", 2)
    optimizers, scheduler = make(pipe)
    pipe.stage_modules[0].get_parameter("0.linear.weight").requires_grad_(False)
    steps(pipe, optimizers, scheduler, range(2))
    save_checkpoint(tmp_path, pipe, optimizers, extra=(2, scheduler.state_dict()))
    expected = steps(pipe, optimizers, scheduler, range(2, 4))
    other = pipeline("zbv", 2, fresh())
    other.stage_modules[0].get_parameter("0.linear.weight").requires_grad_(False)
    optimizers, scheduler = make(other)
    number, state = load_checkpoint(tmp_path, other, optimizers)
    scheduler.load_state_dict(state)
    assert number == 2 and optimizers[0].param_groups[0]["lr"] == 0.0025
    assert all_same(steps(other, optimizers, scheduler, range(2, 4)), expected)


def test_random_numbers_go_on(tmp_path: Path) -> None:
    def make() -> Pipeline:
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout()) for _ in range(4)]
        return Pipeline(layers, "gpipe", 2, squared, num_ranks=1)

    pipe, other = make(), make()
    save_checkpoint(tmp_path, pipe)
    batch = CASE.batches(1, 9)[0]
    expected = pipe.step(*batch.args, target=batch.target).loss
    load_checkpoint(tmp_path, other)
    assert same_bits(other.step(*batch.args, target=batch.target).loss, expected)


def test_random_numbers_of_each_microbatch_go_on_in_another_cut(tmp_path: Path) -> None:
    def make(schedule: str, num_ranks: int) -> tuple[Pipeline, Optimizer]:
        torch.manual_seed(4)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)) for _ in range(4)]
        pipe = Pipeline(layers, schedule, COUNT, squared, num_ranks=num_ranks, rng="per_microbatch")
        return pipe, momentum(pipe)

    pipe, optimizer = make("1f1b", 4)
    train(pipe, optimizer, range(2))
    save_checkpoint(tmp_path, pipe, optimizer)
    expected = train(pipe, optimizer, range(2, 4))
    other, their = make("zbv", 2)
    load_checkpoint(tmp_path, other, their)
    assert other.step_count == 2 and all_same(train(other, their, range(2, 4)), expected)


@pytest.mark.parametrize(
    ("load", "error", "text"),
    [
        (
            lambda d: load_checkpoint(d / "no", pipeline("1f1b", 2)),
            FileNotFoundError,
            r"path = .*no.: there is no such folder",
        ),
        (lambda d: load_checkpoint(d, pipeline("1f1b", 2, CASE.layers(9))), KeyError, "has no '8.linear.weight'"),
        (lambda d: load_checkpoint(d, pipeline("1f1b", 2, CASE.layers(7))), ValueError, "has '7.linear.bias'"),
        (
            lambda d: load_checkpoint(d, pipeline("1f1b", 2, [*CASE.layers(7), Block(9)])),
            ValueError,
            r"7.linear.weight is .* shape \(9, 9\) in the pipeline but .* shape \(6, 6\) in the checkpoint",
        ),
    ],
)
def test_what_does_not_fit(load: Callable[[Path], Any], error: type[Exception], text: str, tmp_path: Path) -> None:
    pipe = pipeline("1f1b", 2)
    save_checkpoint(tmp_path, pipe, momentum(pipe))
    with pytest.raises(error, match=text):
        load(tmp_path)


def test_a_tensor_that_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    def build(value: torch.Tensor) -> Pipeline:
        layers = CASE.layers(8)
        layers[6].register_buffer("scale", value)
        return pipeline("1f1b", 2, layers)

    dense, expanded = build(torch.ones(3)), build(torch.ones(1).expand(3))
    one_row = build(torch.ones(3).expand(1, 3))  # as position ids often are
    save_checkpoint(tmp_path / "dense", dense)
    refused = (
        lambda: save_checkpoint(tmp_path / "a", expanded),
        lambda: load_checkpoint(tmp_path / "dense", expanded),
        lambda: MemoryCheckpoint(expanded, name="expanded", folder=tmp_path).save(),
    )
    for call in refused:
        with pytest.raises(ValueError, match="elements of 6.scale share memory"):
            call()
    save_checkpoint(tmp_path / "row", one_row)
    load_checkpoint(tmp_path / "row", one_row)


def test_optimizers_that_do_not_fit(tmp_path: Path) -> None:
    pipe = pipeline("1f1b", 2)
    with pytest.raises(TypeError, match="optimizer is a int: give a torch optimizer"):
        save_checkpoint(tmp_path, pipe, 3)
    with pytest.raises(ValueError, match="group 0 .* shape .*pipe.parameters"):
        save_checkpoint(tmp_path, pipe, momentum(nn.Linear(3, 3)))
    optimizer = momentum(pipe)
    optimizer.state[next(pipe.parameters())]["history"] = [1.0]
    with pytest.raises(ValueError, match="state of 0.linear.weight has 'history', a list"):
        save_checkpoint(tmp_path, pipe, optimizer)
    save_checkpoint(tmp_path, pipe, adamw(pipe))
    with pytest.raises(ValueError, match="group.* lr = 0.01 and 0.02"):
        load_checkpoint(tmp_path, pipe, torch.optim.AdamW(list(pipe.parameters())))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_file_that_cannot_be_written_is_named(asynchronous: bool, tmp_path: Path) -> None:
    """The system's error, not that of torch.save, which then cannot end its archive."""
    pipe = pipeline("1f1b", 2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))  # bytes of a file
    try:
        with pytest.raises(OSError, match=r"File too large: .*/rank0_0.distcp'") as caught:
            writing = save_checkpoint(tmp_path / "a", pipe, asynchronous=asynchronous)
            assert writing is not None
            writing.result()
        assert caught.value.errno == errno.EFBIG
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []
    save_checkpoint(tmp_path / "a", pipe)


def failing_save(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Pipeline, Any]:
    """A save in the background that has failed, as on a full disk."""
    pipe = pipeline("1f1b", 2)

    def write(*_: Any) -> int:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr("fastpipe.runtime.checkpoint._SyncedFile.write", write)
        writing = save_checkpoint(tmp_path / "a", pipe, asynchronous=True)
        assert writing is not None and wait([writing], PATIENCE).done
        return pipe, writing


def test_a_save_in_the_background_that_failed_is_told_at_the_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pipe, _ = failing_save(monkeypatch, tmp_path)
    assert "was not saved: OSError: no space left" in caplog.text
    with pytest.raises(RuntimeError, match="checkpoint .*a .*OSError: no space left"):
        save_checkpoint(tmp_path / "b", pipe)
    save_checkpoint(tmp_path / "b", pipe)
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_but_not_twice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pipe, writing = failing_save(monkeypatch, tmp_path)
    with pytest.raises(OSError, match="no space left"):
        writing.result()
    save_checkpoint(tmp_path / "b", pipe)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def take_that_of_another_step(file: Path) -> None:
    shutil.copyfile(file.parent.with_name("step2") / file.name, file)


@pytest.mark.parametrize("name", ["rank0_0.distcp", ".metadata", "manifest.json"])
@pytest.mark.parametrize("spoil", [truncate, flip, Path.unlink, take_that_of_another_step])
def test_a_file_that_is_not_as_it_was_saved(
    spoil: Callable[[Path], None], name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is refused by its name, and nothing is loaded; what can be seen without reading it all is passed over."""
    pipe = pipeline("1f1b", 2)
    optimizer = adamw(pipe)
    for step in (1, 2, 3):
        train(pipe, optimizer, range(1))
        save_checkpoint(tmp_path / f"step{step}", pipe, optimizer)
    assert latest_checkpoint(tmp_path) == tmp_path / "step3"
    file = tmp_path / "step3" / name
    spoil(file)
    if name == "manifest.json" and spoil is take_that_of_another_step:
        file = file.with_name(".metadata")  # which has another checksum than that manifest says
    train(pipe, optimizer, range(1))
    before = copy.deepcopy(pipe.state_dict())
    with pytest.raises(ValueError, match=f"{file} .*: the checkpoint is damaged; load another one"):
        load_checkpoint(tmp_path / "step3", pipe, optimizer)
    assert all(same_bits(value, before[key]) for key, value in pipe.state_dict().items())
    latest = latest_checkpoint(tmp_path)
    if spoil in (truncate, Path.unlink):
        assert latest == tmp_path / "step2" and str(file) in caplog.text
    assert latest is not None and load_checkpoint(tmp_path / "step2", pipe, optimizer) is None


def test_a_checkpoint_without_a_manifest_loads_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As of DCP alone. Files of two saves are refused, as their names and sizes are the same."""
    pipe = pipeline("1f1b", 2)
    for name in ("a", "b"):
        dcp.save({"model": pipe.state_dict()}, checkpoint_id=tmp_path / name, no_dist=True)
        train(pipe, momentum(pipe), range(1))
    load_checkpoint(tmp_path / "b", pipe)
    assert "has no manifest: its files cannot be verified" in caplog.text
    assert latest_checkpoint(tmp_path) == tmp_path / "b"
    data, metadata = tmp_path / "b" / "__0_0.distcp", tmp_path / "b" / ".metadata"
    shutil.copyfile(tmp_path / "a" / data.name, data)
    os.utime(data, ns=(0, metadata.stat().st_mtime_ns + 1))
    with pytest.raises(ValueError, match=f"{data} is newer than .metadata.* files of two checkpoints are mixed"):
        load_checkpoint(tmp_path / "b", pipe)
    assert latest_checkpoint(tmp_path) == tmp_path / "a"
    truncate(data)
    metadata.touch()
    with pytest.raises(ValueError, match=f"{data} has .* bytes, and had"):
        load_checkpoint(tmp_path / "b", pipe)


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    """In the order in which they were saved; what is no checkpoint stays, also within one."""
    pipe = pipeline("1f1b", 2)
    (tmp_path / "notes").mkdir()
    save_checkpoint(tmp_path / "b", pipe)
    (tmp_path / "b" / "tokenizer.json").touch()
    for step in (12, 8, 9, 10):
        assert save_checkpoint(tmp_path / f"step{step}", pipe, keep=2) is None
        assert latest_checkpoint(tmp_path) == tmp_path / f"step{step}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "notes", "step10", "step9"]
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["tokenizer.json"]
    for keep in (0, True, 1.5, "2"):
        with pytest.raises(ValueError, match=f"keep = {keep!r}: give a whole number"):
            save_checkpoint(tmp_path / "c", pipe, keep=keep)  # type: ignore[arg-type]


def test_a_checkpoint_is_replaced_as_a_whole(tmp_path: Path) -> None:
    """That of four ranks by that of one; a folder with something else is not touched."""
    pipe = pipeline("1f1b", 2)
    save_checkpoint(tmp_path / "a", pipe)
    (tmp_path / "a" / "rank3_0.distcp").touch()
    save_checkpoint(tmp_path / "a", pipe)
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [".metadata", "manifest.json", "rank0_0.distcp"]
    (tmp_path / "a" / "notes.txt").touch()
    with pytest.raises(ValueError, match="path = .*a': the folder has 'notes.txt', which is not a file of"):
        save_checkpoint(tmp_path / "a", pipe)
    with pytest.raises(ValueError, match="path = .*notes.txt': .*notes.txt' is a file; give a new folder"):
        save_checkpoint(tmp_path / "a" / "notes.txt", pipe)
    with pytest.raises(ValueError, match="path = .*notes.txt/b': .*notes.txt' is a file; give a new folder"):
        save_checkpoint(tmp_path / "a" / "notes.txt" / "b", pipe, asynchronous=True)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    load_checkpoint(tmp_path / "a", pipe)


def test_a_path_that_is_none_and_arguments_in_another_order(tmp_path: Path) -> None:
    pipe = Pipeline([nn.Linear(2, 2)], "1f1b", 1, num_ranks=1)
    for call in (save_checkpoint, load_checkpoint):
        with pytest.raises(TypeError, match="pipe: expected a Pipeline, found .*Path; give it after the path"):
            call(pipe, tmp_path)  # type: ignore[operator]
        with pytest.raises(TypeError, match="path = None: give the name of a folder"):
            call(None, pipe)  # type: ignore[operator]
        with pytest.raises(TypeError, match="group: expected a ProcessGroup or None, found str"):
            call(tmp_path, pipe, group="all")  # type: ignore[operator]
    with pytest.raises(ValueError, match="asynchronous = 'no': give True or False"):
        save_checkpoint(tmp_path, pipe, asynchronous="no")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="extra cannot be saved: .*lambda.*; leave it out"):
        save_checkpoint(tmp_path, pipe, extra=lambda: None)
    with pytest.raises(TypeError, match="pipe: expected a Pipeline, found NoneType"):
        load_safetensors(tmp_path, None)  # type: ignore[arg-type]
