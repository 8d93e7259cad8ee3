"""Shared memory with the ranks as threads: what arrives, where it lies, who may hold it, and what is left."""

import copy
import gc
import os
import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from fastpipe.program import Program  # noqa: E402
from fastpipe.runtime import native  # noqa: E402
from fastpipe.runtime.common.failure import FailureError  # noqa: E402
from fastpipe.runtime.stage.losses import StageWork  # noqa: E402
from fastpipe.runtime.transport.shared_memory import SharedMemory  # noqa: E402
from tests.patience import PATIENCE  # noqa: E402
from tests.runtime import native_ranks  # noqa: E402
from tests.runtime.checks import same_bits  # noqa: E402
from tests.runtime.native_ranks import NativeRanks, lowered  # noqa: E402

ROWS, WIDTH, COUNT = 3, 8, 6
needs_extension = pytest.mark.skipif(native.load() is None, reason=native.native_status())


class Links(SharedMemory):
    """All ranks in one process, each with its own side."""

    def __init__(self, *_: Any) -> None:
        self.links: list[Any] = []
        self._copies = None

    def native(self, runtime: Any, program: Program, rank: int, timeout: float) -> Any:
        if not self.links:
            self.links = [
                runtime.SharedMemoryLink(r, program.num_ranks, program.num_ranks) for r in range(program.num_ranks)
            ]
            for own, link in enumerate(self.links):
                for other, peer in enumerate(self.links):
                    if other != own:
                        link.connect(other, *peer.address())
        self.link = self.links[rank]
        return super().native(runtime, program, rank, timeout)


@pytest.fixture
def ranks_of(monkeypatch: pytest.MonkeyPatch) -> type[NativeRanks]:
    """`NativeRanks` over shared memory."""
    if native.load() is None:
        pytest.skip(native.native_status())
    monkeypatch.setattr(native_ranks, "Loopback", Links)
    return NativeRanks


def data(count: int = COUNT) -> tuple[list[Any], list[Any]]:
    generator = torch.Generator().manual_seed(1)
    inputs = [(torch.randn(ROWS, WIDTH, generator=generator),) for _ in range(count)]
    return inputs, [torch.randn(ROWS, WIDTH, generator=generator) for _ in range(count)]


def layers(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]


@pytest.mark.parametrize(("name", "num_ranks", "num_stages"), [("gpipe", 4, 4), ("dualpipev", 2, 4)])
def test_gradients_are_those_of_plain_autograd(
    ranks_of: type[NativeRanks], name: str, num_ranks: int, num_stages: int
) -> None:
    modules = layers(num_stages)
    plain = nn.Sequential(*copy.deepcopy(modules))
    inputs, targets = data()
    ranks = ranks_of(modules, lowered(name, num_ranks, COUNT))
    for step in range(3):
        ranks.step(inputs, targets, announce=step == 0)
        assert not ranks.errors
        for (value,), target in zip(inputs, targets, strict=True):
            native_ranks.squares(plain(value), target).backward()
    for one, other in zip(nn.Sequential(*modules).parameters(), plain.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None and same_bits(one.grad, other.grad)


def every_kind() -> list[torch.Tensor]:
    """Tensors of every type and odd shapes and strides."""
    codes = torch.arange(24, dtype=torch.uint8)
    names = ["float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64", "complex64", "complex128"]
    names += ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
    found = [codes.repeat(16).view(getattr(torch, name)) for name in names]
    found += [codes > 7, torch.tensor(3.5), torch.empty(0, 4), torch.arange(5.0)]
    found += [torch.randn(4, 6).t(), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)]
    return found


def test_every_type_shape_and_stride_arrives_as_it_was(ranks_of: type[NativeRanks]) -> None:
    sent = every_kind()
    seen = []

    def look(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        for one, other in zip(rest, sent, strict=True):
            assert one.dtype == other.dtype and one.stride() == other.stride() and one.shape == other.shape
            assert torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8)) or not one.numel()
            assert one.data_ptr() % 64 == 0
        seen.append(len(rest))
        return x

    first, last = layers(2)
    ranks = ranks_of([lambda x: (first(x), *sent), look, last], lowered("1f1b", 3, COUNT))
    for step in range(2):
        ranks.step(*data(), announce=step == 0)
        assert not ranks.errors, ranks.errors
    assert seen == [len(sent)] * 2 * COUNT


def test_what_is_received_lies_in_few_places(ranks_of: type[NativeRanks]) -> None:
    places = []
    first, last = layers(2)
    ranks = ranks_of([first, lambda x: (places.append(x.data_ptr()), last(x))[1]], lowered("1f1b", 2, COUNT))
    for step in range(20):
        ranks.step(*data(), announce=step == 0)
    assert not ranks.errors
    assert len(places) == 20 * COUNT and len(set(places)) <= 2 * COUNT
    maps = Path("/proc/self/maps").read_text().splitlines()
    shared = [[int(end, 16) for end in line.split()[0].split("-")] for line in maps if "memfd:fastpipe" in line]
    assert all(any(low <= place < high for low, high in shared) for place in places), "it was copied out"


class Keeps(list[torch.Tensor]):
    """A stage that hands on what it gets, and keeps it."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.append(x.detach())
        return x


def test_what_a_stage_keeps_is_not_overwritten(ranks_of: type[NativeRanks]) -> None:
    first, last = layers(2)
    kept, copies = Keeps(), Keeps()
    ranks = ranks_of([first, lambda x: (copies(x.clone()), kept(x))[1], last], lowered("1f1b", 3, COUNT))
    inputs, targets = data()
    for step in range(40):
        ranks.step([(value + step,) for (value,) in inputs], targets, announce=step == 0)
        assert not ranks.errors
        if step % 10 == 9:
            assert all(map(torch.equal, kept, copies))
            del kept[: len(kept) // 2], copies[: len(copies) // 2]


def test_messages_may_grow_and_shrink(ranks_of: type[NativeRanks]) -> None:
    first, last = layers(2)
    ranks = ranks_of([first, nn.Identity(), last], lowered("1f1b", 3, COUNT))
    for rows in (1, 3000, 2, 50000, 70000, 7):
        inputs = [(torch.randn(rows, WIDTH),) for _ in range(COUNT)]
        for announce in (True, False):
            ranks.step(inputs, [torch.randn(rows, WIDTH) for _ in range(COUNT)], announce=announce)
            assert not ranks.errors


def used() -> tuple[int, int]:
    """Descriptors and mappings of shared memory."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().count("memfd:fastpipe")
    return len(os.listdir("/proc/self/fd")), maps


def test_nothing_grows_in_100_steps_and_nothing_is_left(ranks_of: type[NativeRanks]) -> None:
    before = used()
    ranks = ranks_of(layers(2), lowered("1f1b", 2, 2))
    inputs, targets = data(2)
    ranks.step(inputs, targets, announce=True)
    ranks.step(inputs, targets, announce=False)
    one = used()
    for _ in range(100):
        ranks.step(inputs, targets, announce=False)
    assert not ranks.errors and used() == one
    del ranks
    assert used() == before


def test_a_forked_process_frees_nothing(ranks_of: type[NativeRanks]) -> None:
    """It has copies of the tensors, and lets go of them at its end; their memory is shared with it."""
    kept = Keeps()
    first, last = layers(2)
    ranks = ranks_of([first, kept, last], lowered("1f1b", 3, 2))
    inputs, targets = data(2)
    ranks.step(inputs, targets, announce=True)
    ranks.step(inputs, targets, announce=False)
    copies = [x.clone() for x in kept]
    child = os.fork()
    if child == 0:
        kept.clear()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    held = list(kept)
    for step in range(10):
        ranks.step([(value + step,) for (value,) in inputs], targets, announce=False)
    assert all(torch.equal(one, other) for one, other in zip(held, copies, strict=True))


def test_a_silent_peer_is_given_up(ranks_of: type[NativeRanks]) -> None:
    ranks = ranks_of(layers(2), lowered("1f1b", 2, 2))
    transport = ranks.executors[0].transport
    executor = type(ranks.executors[0])
    stages = dict(enumerate(ranks.stages[:1]))
    found: list[BaseException] = []
    options = {"on_failure": lambda _, error: found.append(error), "timeout": 0.3, "num_threads": 1}
    transport.links = []
    alone = executor(ranks.program, 0, stages, transport, **options)
    ranks.stages[0].begin(StageWork(args=data(2)[0]))
    thread = threading.Thread(target=lambda: pytest.raises(FailureError, alone.run, 1, True))
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert found and isinstance(found[0], FailureError) and found[0].failure.rank == 1
    assert "no transfer with rank 1" in str(found[0])


@needs_extension
def test_a_rank_looks_before_it_sleeps_where_a_core_is_free() -> None:
    runtime: Any = native.load()
    cores = len(os.sched_getaffinity(0))
    alone, among_some, crowded = (runtime.SharedMemoryLink(0, 2, n).spin for n in (1, max(2, cores - 1), cores + 1))
    assert alone > among_some >= crowded == 0.0


@needs_extension
def test_memory_is_sealed() -> None:
    runtime: Any = native.load()
    _, descriptor, _ = runtime.SharedMemoryLink(0, 2, 2).address()
    with pytest.raises(OSError):
        os.ftruncate(descriptor, 1)


@needs_extension
@pytest.mark.parametrize("wrong", [{"descriptor": 0}, {"nonce": 1}, {"process": 2**22 + 1}])
def test_what_is_not_a_board_is_refused(wrong: dict[str, int]) -> None:
    runtime: Any = native.load()
    one, other = (runtime.SharedMemoryLink(rank, 2, 2) for rank in range(2))
    address = dict(zip(("process", "descriptor", "nonce"), other.address(), strict=True)) | wrong
    with pytest.raises(RuntimeError, match="shared memory"):
        one.connect(1, **address)
