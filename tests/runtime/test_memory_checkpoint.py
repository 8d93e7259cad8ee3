"""Copies in memory, of one process: complete at every instant, private, and refused by name where they do not work."""

import copy
import gc
import os
import resource
import subprocess
import sys
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest
import torch

from fastpipe import MemoryCheckpoint, Pipeline
from fastpipe.runtime import memory_checkpoint
from fastpipe.runtime.common import packing, pytree, torch_private
from tests.runtime.test_checkpoint import (
    CASE,
    Counts,
    adagrad,
    adamw,
    all_same,
    fresh,
    momentum,
    pipeline,
    tied_late,
    train,
    uninterrupted,
)


def spoil(path: Path) -> None:
    """Flip one bit of a tensor."""
    with path.open("r+b") as file:
        file.seek(200)
        byte = file.read(1)
        file.seek(200)
        file.write(bytes([byte[0] ^ 1]))


def make(folder: Path, layers: Any = None, optimizer: Callable[[Pipeline], Any] = adamw) -> tuple[Any, Any, Any]:
    pipe = pipeline("1f1b", 2, layers)
    optimizes = optimizer(pipe)
    return pipe, optimizes, MemoryCheckpoint(pipe, optimizes, name="test", folder=folder)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("fastpipe-*/*"))


@pytest.mark.parametrize("optimizer", [adamw, momentum, adagrad])
def test_training_goes_on(optimizer: Callable[[Any], Any], tmp_path: Path) -> None:
    pipe, optimizes, memory = make(tmp_path, optimizer=optimizer)
    assert memory.load() is None
    for step in range(3):
        train(pipe, optimizes, range(step, step + 1))
        memory.save({"step": step + 1, "rates": (0.1, [None, "x"]), "milestones": Counter({3: 1})})
    before = torch.get_rng_state()
    del memory, pipe
    torch.randn(3)
    pipe, optimizes, memory = make(tmp_path, fresh(), optimizer)
    assert memory.load() == {"step": 3, "rates": (0.1, [None, "x"]), "milestones": Counter({3: 1})}
    assert pipe.step_count == 3 and torch.equal(torch.get_rng_state(), before)
    assert all_same(train(pipe, optimizes, range(3, 5)), uninterrupted(optimizer, range(3, 5)))
    memory.close()
    assert files(tmp_path) == []


def test_who_does_not_load_leaves_no_older_copy_that_looks_newer(tmp_path: Path) -> None:
    _, _, memory = make(tmp_path)
    for _ in range(3):
        memory.save({"attempt": 1})
    del memory
    _, _, memory = make(tmp_path)
    for _ in range(2):
        memory.save({"attempt": 2})
    assert [path.name for path in files(tmp_path)] == ["0-4", "0-5"] and memory.load() == {"attempt": 2}
    memory.close()


@pytest.mark.parametrize("holds", [lambda t: {"n": [t, 7]}, lambda t: (t,), lambda t: t, lambda t: {}])
def test_the_extra_state_of_a_module_may_hold_tensors(holds: Callable[[Any], Any], tmp_path: Path) -> None:
    def values(seed: float) -> list[torch.Tensor]:
        return [torch.full((3, 2), seed + i).t() for i in range(12)]

    _, _, memory = make(tmp_path, [Counts(holds(value)) for value in values(0.5)])
    memory.save({"seen": torch.arange(3)})
    del memory
    layers = [Counts(holds(value)) for value in values(90.0)]
    _, _, memory = make(tmp_path, layers)
    seen = memory.load()["seen"]
    memory.save({})
    memory.save({})  # the loaded ones are in memory of their own
    assert torch.equal(seen, torch.arange(3))
    expected = [pytree.tree_leaves(holds(value)) for value in values(0.5)]
    for layer, wanted in zip(layers, expected, strict=True):
        assert all(map(same_leaf, pytree.tree_leaves(layer.extra), wanted))
    memory.close()


def same_leaf(found: Any, wanted: Any) -> bool:
    return torch.equal(found, wanted) if isinstance(wanted, torch.Tensor) else bool(found == wanted)


@pytest.mark.parametrize(
    "extra",
    [
        [None, True, 1 << 80, -0.5, "é", b"a", bytearray(b"b"), (1, {2: 3}), [{4}, frozenset({5})]],
        OrderedDict(a=Counter("aab"), b=OrderedDict()),
        [torch.zeros(0, 3), torch.tensor(True), torch.arange(12).view(3, 4).t(), torch.eye(4)[:, ::2]],
        [torch.zeros(2, dtype=torch.bfloat16), torch.tensor([1j]).conj(), torch.zeros(1).expand(3)],
    ],
)
def test_extra_comes_back(extra: Any, tmp_path: Path) -> None:
    _, _, memory = make(tmp_path)
    memory.save(extra)
    found = memory.load()
    leaves, structure = pytree.tree_flatten(found)
    wanted, wanted_structure = pytree.tree_flatten(extra)
    assert structure == wanted_structure and list(map(type, leaves)) == list(map(type, wanted))
    assert all(map(same_leaf, leaves, wanted))
    memory.close()


def test_a_tensor_in_two_places_stays_one(tmp_path: Path) -> None:
    _, _, memory = make(tmp_path)
    shared = torch.ones(3)
    memory.save([shared, {"a": shared}])
    first, second = memory.load()
    assert first is second["a"] and torch.equal(first, shared)
    memory.close()


def test_what_was_read_is_in_no_cycle() -> None:
    """One would hold the memory of a whole file."""
    text, _ = memory_checkpoint._write_plain({"extra": {"": [torch.ones(3)]}})
    memory = torch.ones(3)
    seen = weakref.ref(memory)
    gc.disable()
    try:
        assert torch.equal(memory_checkpoint._read_plain(text, [memory])["extra"][""][0], memory)
        del memory
        assert seen() is None
    finally:
        gc.enable()


def test_what_is_saved_may_change_its_form(tmp_path: Path) -> None:
    """Places in a file are found anew: an optimizer gets its state, a tensor another shape, dtype, strides or flag."""
    pipe, optimizes, memory = make(tmp_path)
    value = torch.arange(6.0).view(2, 3)
    forms = [value, value + 1, value.t(), value.view(3, 2), value.to(torch.float64), value.clone().requires_grad_()]
    for number, form in enumerate([*forms, *reversed(forms)]):
        if number in (4, 5):
            train(pipe, optimizes, range(number - 4, number - 3))
        memory.save([form, number])
        (name,) = memory._slots[0]._folder.glob(f"0-{number + 1}")
        image = torch.frombuffer(bytearray(name.read_bytes()), dtype=torch.uint8)
        rows, within, text = memory_checkpoint._read_plain(packing.text_of(image))
        assert any(key.startswith("state.") for _, key, *_ in rows) == (number >= 4)
        views = [packing.PackedTensor(*place).view(image) for place in within]
        (found, last), *_ = memory_checkpoint._read_plain(text, views)["extra"]
        assert last == number and torch.equal(found, form) and found.stride() == form.stride()
        assert found.dtype == form.dtype and found.requires_grad == form.requires_grad
        for section, key, _, *place in rows:
            if section == "model":
                assert torch.equal(packing.PackedTensor(*place).view(image), pipe.state_dict()[key])
    optimizes.param_groups[0]["lr"] = 0.25
    memory.save("last")
    optimizes.param_groups[0]["lr"] = 0.5
    assert memory.load() == "last" and optimizes.param_groups[0]["lr"] == 0.25
    memory.close()


class Sub(torch.Tensor):
    pass


class Level(IntEnum):
    LOW = 1


class Killed(BaseException):
    """Where a process would have ended."""


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (memory_checkpoint._Slots, "reserve"),
        (memory_checkpoint, "_map"),
        (packing, "pack"),
        (packing, "write_text"),
        (memory_checkpoint, "bit_sum"),
        (memory_checkpoint._Slots, "publish"),
    ],
)
@pytest.mark.parametrize(
    "saves", [pytest.param(1, marks=pytest.mark.nightly), pytest.param(2, marks=pytest.mark.nightly), 3]
)
def test_the_copy_before_it_is_whole(
    owner: Any, name: str, saves: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pipe, optimizes, memory = make(tmp_path)
    for step in range(saves):
        train(pipe, optimizes, range(step, step + 1))
        memory.save({"step": step + 1})
    train(pipe, optimizes, range(saves, saves + 1))
    done = []

    def kill(*_: Any) -> None:
        done.append(1)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, kill)
        if name == "_map" and saves > 1:
            memory._slots[0]._mapped.clear()
        with pytest.raises(Killed):
            memory.save({"step": saves + 1})
    assert done
    del memory, pipe
    pipe, optimizes, memory = make(tmp_path, fresh())
    assert memory.load() == {"step": saves}
    assert all_same(train(pipe, optimizes, range(saves, 5)), uninterrupted(adamw, range(saves, 5)))
    memory.save({"step": 5})
    memory.save({"step": 6})
    assert [path.name for path in files(tmp_path)] == [f"0-{saves + 1}", f"0-{saves + 2}"]
    memory.close()


def test_an_altered_copy_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, _, memory = make(tmp_path)
    memory.save({"step": 1})
    memory.save({"step": 2})
    spoil(files(tmp_path)[-1])
    assert memory.load() == {"step": 1}
    assert "generation 2 in memory is not used: the copy of rank 0 is altered" in caplog.text
    assert [path.name for path in files(tmp_path)] == ["0-1"]
    memory.close()


def test_two_values_are_not_loaded_into_one_tied_weight(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    memory = MemoryCheckpoint(pipeline("1f1b", 2, CASE.layers(12)), name="test", folder=tmp_path)
    memory.save("untied")
    del memory
    pipe = pipeline("1f1b", 2, tied_late())
    before = copy.deepcopy(pipe.state_dict())
    memory = MemoryCheckpoint(pipe, name="test", folder=tmp_path)
    assert memory.load() is None
    assert "generation 1 in memory is not used: rank 0 has no copy that fits" in caplog.text
    assert all(torch.equal(value, before[key]) for key, value in pipe.state_dict().items())
    memory.save("tied")
    assert memory.load() == "tied"
    memory.close()


def with_foreign_folder(folder: Path) -> None:
    _, _, memory = make(folder)
    (place,) = folder.glob("fastpipe-*")
    memory.close()
    place.mkdir(mode=0o755)
    memory_checkpoint._open.clear()
    make(folder)


def with_a_state_of_its_own_class(folder: Path) -> None:
    """As of optimizers whose state has 8 bits, and scales."""
    _, optimizer, memory = make(folder)
    (parameter, *_) = optimizer.param_groups[0]["params"]
    optimizer.state[parameter]["momentum"] = torch.eye(2).as_subclass(Sub)
    memory.save()


HALVES = torch.arange(6, dtype=torch.uint8).view(torch.int4)


def with_halves_of_bytes(folder: Path) -> None:
    pipe, _, memory = make(folder)
    next(iter(pipe.stage_modules.values())).get_submodule("0").register_buffer("packed", HALVES)
    memory.save()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda folder: MemoryCheckpoint(pipeline("1f1b", 2), folder=folder), "name: the job has no name"),
        (lambda folder: MemoryCheckpoint(pipeline("1f1b", 2), name="a", folder=folder, keep=0), "keep = 0: give"),
        (
            lambda folder: MemoryCheckpoint(pipeline("1f1b", 2), name="a", folder=folder / "b"),
            "there is no such folder",
        ),
        (lambda folder: [make(folder), make(folder)], "name: this script has a MemoryCheckpoint already"),
        (lambda folder: make(folder)[2].save(torch.device("cpu")), r"^extra has a torch\.device, which is not copied"),
        (lambda folder: make(folder)[2].save([lambda: 3]), r"^extra has a builtins\.function, which is not copied"),
        (
            lambda folder: make(folder, [Counts((torch.float32,)) for _ in range(12)])[2].save(),
            r"^model, '0\._extra_state', has a torch\.dtype, which is not copied",
        ),
        (lambda folder: make(folder)[2].save({"a": [os.system]}), r"^extra has a builtins\.builtin_function_or_method"),
        (lambda folder: make(folder)[2].save(torch.eye(2).to_sparse()), r"^extra has a torch\.Tensor, .*dense tensors"),
        (lambda folder: make(folder)[2].save([HALVES]), r"^extra has a tensor of torch\.int4, .*as torch\.uint8"),
        (with_halves_of_bytes, r"^model, '0\.packed', has a tensor of torch\.int4, which torch does not copy"),
        (lambda folder: make(folder)[2].save(torch.eye(2).as_subclass(Sub)), r"^extra has a tests\..*\.Sub, which"),
        (with_a_state_of_its_own_class, r"^optimizer, '.*\.momentum', has a tests\..*\.Sub, which is not copied"),
        (lambda folder: make(folder)[2].save(Level.LOW), r"^extra has a tests\..*\.Level, which is not copied"),
        (lambda folder: MemoryCheckpoint(folder), "pipe: expected a Pipeline, found .*Path"),  # type: ignore[arg-type]
        (
            lambda folder: MemoryCheckpoint(pipeline("1f1b", 2), name=5, folder=folder),  # type: ignore[arg-type]
            "name: expected a str or None, found int",
        ),
        (
            lambda folder: MemoryCheckpoint(pipeline("1f1b", 2), name="a", folder=5),  # type: ignore[arg-type]
            "folder = 5: give the name of a folder",
        ),
        (with_foreign_folder, "is not this user's private folder"),
    ],
)
def test_what_is_refused(
    call: Callable[[Path], Any], text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises((ValueError, TypeError), match=text):
        call(tmp_path)


def test_one_that_is_closed_is_refused_and_leaves_the_next_one_alone(tmp_path: Path) -> None:
    _, _, memory = make(tmp_path)
    memory.save()
    memory.close()
    for call in (memory.save, memory.load):
        with pytest.raises(RuntimeError, match="has been closed, and its copies are removed: make another one"):
            call()
    _, _, following = make(tmp_path)
    following.save("kept")
    memory.close()
    assert following.load() == "kept"
    following.close()


def test_a_file_that_may_not_be_so_large_is_named(tmp_path: Path) -> None:
    _, _, memory = make(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))  # bytes of a file
    try:
        with pytest.raises(OSError, match=r"File too large: '.*/0\.writing'"):
            memory.save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    memory.save()
    memory.close()


def test_nothing_is_executed_that_is_in_a_file() -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.system, ("exit 1",)

    with pytest.raises(ValueError, match="has a (posix|os).system"):
        memory_checkpoint._read_plain(memory_checkpoint.pickle.dumps(Evil()))


def test_copies_of_jobs_that_have_ended_are_removed(tmp_path: Path) -> None:
    """The agent of torchrun that restarted them is gone; that of another job still runs."""
    _, _, memory = make(tmp_path)
    place = memory._folder
    prefix = place.name.rpartition("-")[0]
    ended = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = {pid: torch_private.start_of_process(pid) for pid in (ended.pid, os.getpid())}
    ended.communicate(b"\n")
    for pid, start in started.items():
        (tmp_path / f"{prefix}-{pid}").mkdir(mode=0o700)
        for name in ("0-1", "0.writing", f"agent.{pid}.{start}"):
            (tmp_path / f"{prefix}-{pid}" / name).touch()
    memory.close()
    _, _, memory = make(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([place.name, f"{prefix}-{os.getpid()}"])
    memory.close()
