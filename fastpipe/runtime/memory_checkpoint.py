"""A checkpoint of each step in the memory of the hosts, for restarts that lose no step.

torchrun kills and restarts all processes of a host when one dies, so a copy in a process's own memory dies with it. The
copies are files in a tmpfs (``/dev/shm``) instead, which outlive the processes. Every rank has a file on its own host
and, with ``keep=2`` or more, on other hosts, which receive it over Gloo.

A rank has two files on a host. Its name says when one is complete: ``3-17`` is generation 17 of rank 3, ``3.writing``
is incomplete. A save renames the older file to ``3.writing``, overwrites it in place (its memory is reused) and renames
it to the new generation. Before a rank does so, all ranks have completed the generation before. So the last generation
that all ranks have is complete at every instant. A restart looks for it, fetches what is only on another host, and
verifies it.

A file is a header and a block of `fastpipe.runtime.common.packing`. Its text has the keys of the tensors and all other
values, which are plain or hold tensors within plain ones: a pickle that is read by `_PlainReader`, which executes
nothing.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import io
import json
import logging
import mmap
import os
import pickle
import secrets
import stat
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

from fastpipe.checkpoint_folder import Manifest, locate
from fastpipe.checks import as_path, check_type, is_whole
from fastpipe.runtime.checkpoint import (
    as_optimizers,
    check_all_optimize,
    check_processes,
    flat_state,
    load_checkpoint,
    names_of,
    optimizes,
    restore_together,
    shared_call,
    template,
    whole_state,
)
from fastpipe.runtime.common import (
    EXIT_SECONDS,
    attended,
    bit_sum,
    call_in_thread,
    dense_all,
    first_line,
    local_part,
    packing,
    torch_private,
)
from fastpipe.runtime.coordination import Replies, Reply, host_name, job_name, shares_store
from fastpipe.runtime.pipeline import Pipeline
from fastpipe.runtime.transport import drop_side_group, gather_messages, side_group

_MAGIC = b"fastpip5"
_HEADER = struct.Struct("<8sqq20s")  # magic, sum of the block, step count, layout
_START, _ROUND = 64, 1 << 16

logger = logging.getLogger("fastpipe")
_open: WeakValueDictionary[Path, MemoryCheckpoint] = WeakValueDictionary()


class MemoryCheckpoint:
    """A copy of the training state in the memory of the hosts, for a restart that continues from the last step.

    It complements `save_checkpoint`, which is slower, and survives the end of the job. All methods are collective over
    all processes::

        memory = fastpipe.MemoryCheckpoint(pipe, optimizer)
        extra = memory.load(fastpipe.latest_checkpoint(folder))  # the newer one of the two; None if there is none
        for step in range(extra["step"] if extra else 0, steps):
            ...  # pipe.step, optimizer.step
            memory.save({"step": step + 1})
        memory.close()

    A copy serves the processes of one job, which must be as many as before and hold the same layers; otherwise `load`
    takes the checkpoint on disk. The job is the launch of torchrun, whatever restarts follow; without torchrun's store,
    it is what ``SLURM_JOB_ID`` or torchrun's ``--rdzv-id`` names.

    A host needs twice the size of the copies on it: for AdamW in fp32, 24 bytes for each parameter of its ranks, and
    again for each copy of another host. The files are private to the user (mode 0600).

    Args:
        pipe: the pipeline.
        optimizer: one or several, of `pipe.parameters()`.
        keep: the number of hosts that have a copy of each rank: its own, and ``keep - 1`` others, so that as many hosts
            may be lost. With fewer hosts there are fewer copies, and a warning.
        name: of the job, the same after a restart and for no other job of this user; only for launchers other than
            those above, and for a second pipeline in the same script.
        folder: a tmpfs, which every host has.

    Raises:
        ValueError: for `keep` below 1, a job without a name, a folder that does not exist or is another user's; if
            there is a MemoryCheckpoint of the same name; if some ranks give an optimizer and others none.
    """

    def __init__(
        self,
        pipe: Pipeline,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        *,
        keep: int = 1,
        name: str | None = None,
        folder: str | os.PathLike[str] = torch_private.MEMORY_FOLDER,
    ) -> None:
        check_type(Pipeline, pipe=pipe)
        self._pipe, self._optimizers = pipe, as_optimizers(optimizer)
        self._group: Any = None
        self._purpose = ""  # of the group, known when the ranks have named the job
        self._rank, self._size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._generation = 0
        self._sizes: list[list[int]] = []  # of the last two saves, each with a file of its own
        self._has_replicas = False  # which this pipeline's exchanges do not reach
        self._writing: Future[None] | None = None
        hosts: list[str] = []

        def make() -> Reply:
            check_processes(pipe)
            if not is_whole(keep, 1):
                raise ValueError(
                    f"keep = {keep!r}: give a whole number of at least 1: on how many hosts a copy is kept"
                )
            check_type(str | None, name=name)
            if not as_path(folder, "folder", "folder").is_dir():
                raise ValueError(f"folder = {os.fspath(folder)!r}: there is no such folder; give a tmpfs of every host")
            return {"job": f"name={name}" if name else _job()}

        def connect(replies: Replies) -> None:
            self._has_replicas = len(replies.everywhere) < self._size
            # a group for each, as another one may send its copies at the same time
            self._purpose = f"MemoryCheckpoint of {replies[0]['job']}"
            if self._size > 1:
                self._group = side_group(self._purpose, None, pipe._steps.ranks.timeout)
            own = {"host": host_name(), "job": replies[0]["job"], "keep": keep}
            found = self._gather({**own, "optimizes": optimizes(pipe, self._optimizers)})
            check_all_optimize(dict(enumerate(found)))
            if len(kept := sorted({other["keep"] for other in found})) > 1:
                raise ValueError(f"keep = {keep}: the ranks have {kept}; give the same number on every rank")
            hosts.extend(other["host"] for other in found)
            first = found[0]["job"]
            self._folder = Path(folder) / f"fastpipe-{os.geteuid()}-{_digest(host_name())}-{_digest(first)}"

        self._together("MemoryCheckpoint", make, connect)
        self._gather_from_all("MemoryCheckpoint", self._make_folder)
        holders = _holders(hosts, keep)
        if keep > (count := len(set(hosts))) and self._rank == 0:
            logger.warning("keep = %d: there are %d hosts, and as many copies of each rank in memory", keep, count)
        self._slots = {
            rank: _Slots(self._folder, rank)
            for rank in range(self._size)
            if rank == self._rank or self._rank in holders[rank]
        }
        self._holders = holders[self._rank]

    def save(self, extra: Any = None) -> None:
        """Copy the state; call it after each ``optimizer.step()``.

        When it has returned on every rank, a restart continues from here, as each has a copy on its own host. Other
        hosts receive theirs in the background.

        Args:
            extra: other state of the script, the same on every rank: numbers, texts, tensors, tuples, lists and dicts.

        Raises:
            OSError: if there is no room in memory, with the sizes.
            ValueError: for an `extra`, or an extra state of a module, of other types; or an optimizer of other
                parameters.
            StepError: if another rank cannot save, or exits.
            RuntimeError: if the last copy did not reach another host; after `close`.
        """
        pipe = self._pipe
        images: list[Callable[[Tensor], None]] = []

        def make() -> Reply:
            self._check_open()
            self._finish()
            state = whole_state(pipe, self._optimizers, extra)
            size, write = _image(state, _layout(pipe, state))
            images.append(write)
            return {"rank": self._rank, "size": size, "generation": self._generation}

        replies = self._gather_from_all("MemoryCheckpoint.save", make)
        sizes = [reply["size"] for reply in sorted(replies, key=lambda reply: reply["rank"])]
        own = self._slots[self._rank]

        def copy() -> Reply:
            for rank, slots in self._slots.items():
                slots.reserve(sizes[rank], self._generation)
            images[0](own.memory)
            return {}

        generations = [reply["generation"] for reply in replies]
        self._generation = min(generations)  # the last one that all have, as a rank may have failed to copy a later one
        if self._sizes == [sizes, sizes] and not self._holders:
            copy()
        else:  # other ranks wait for a copy of this one, and would do so if there is none
            self._gather_from_all("MemoryCheckpoint.save", copy)
        self._sizes = [*self._sizes[-1:], sizes]
        self._generation = generation = 1 + max(generations)
        own.publish(generation)
        if self._holders:
            self._writing = call_in_thread(lambda: self._exchange(generation), "fastpipe-memory")

    def load(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Load the copy in memory, or a checkpoint on disk if that is newer or the copy cannot be used.

        The log says why a copy is not used. The older ones are removed.

        Args:
            path: of a checkpoint of `save_checkpoint`, for example `latest_checkpoint(folder)`; None: memory alone.

        Returns:
            The ``extra`` of the save; None if nothing was loaded.

        Raises:
            ValueError: see `load_checkpoint`, like other errors.
            RuntimeError: after `close`.
            StepError: if another rank cannot load.
        """
        pipe = self._pipe
        given: list[Reply] = []
        found: list[Tensor | None] = []

        def make() -> Reply:
            self._check_open()
            self._finish()
            optimizer = flat_state(self._optimizers, names_of(pipe))
            layout = _layout(pipe, {"model": pipe.state_dict(), "optimizer": optimizer})
            on_disk = None if path is None else Manifest.of(locate(path))
            given.append({"layout": layout.hex(), "path": str(path), "disk": on_disk.step if on_disk else -1})
            return {}

        def find(_: Sequence[Reply]) -> None:
            found.append(self._find(given[0]))

        call = f"MemoryCheckpoint.load, path = {path}"
        self._together(call, make, find)
        if (memory := found[0]) is not None:
            return restore_together(pipe, self._optimizers, lambda: self._read(memory), call)
        return None if path is None else load_checkpoint(path, pipe, self._optimizers or None)

    def close(self) -> None:
        """Remove the copies, after training has ended or has been saved on disk.

        Those of a killed job under torchrun are removed when the same user next makes a MemoryCheckpoint on the host;
        without torchrun they stay in the folder until they are deleted by hand, or the host restarts.
        """

        def end() -> Reply:
            self._finish()
            return {}

        self._gather_from_all("MemoryCheckpoint.close", end)
        if self._is_open():  # else the folder may be that of a later one
            _remove(self._folder)
            del _open[self._folder]

    def _is_open(self) -> bool:
        return _open.get(self._folder) is self

    def _check_open(self) -> None:
        if not self._is_open():
            raise RuntimeError("this MemoryCheckpoint has been closed, and its copies are removed: make another one")

    def _finish(self) -> None:
        """Wait for the copy in the background."""
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        # the group's own timeout comes first, with a better message
        control, limit = self._pipe._steps.control, timedelta(seconds=self._pipe._steps.ranks.timeout + EXIT_SECONDS)
        return writing.result() if writing.done() else attended(writing.result, control.lost, limit, opens=False)

    def _make_folder(self) -> Reply:
        if self._folder in _open:
            raise ValueError(
                "name: this script has a MemoryCheckpoint already; close it, or give each a name of its own"
            )
        for agent in self._folder.parent.glob(f"{self._folder.name.rpartition('-')[0]}-*/agent.*.*"):
            _, pid, started = agent.name.split(".", 2)
            others = agent.parent != self._folder and _is_private(agent.parent)
            if others and torch_private.start_of_process(int(pid)) != started:
                _remove(agent.parent)
        with contextlib.suppress(FileExistsError):
            self._folder.mkdir(mode=0o700)
        if not _is_private(self._folder):
            raise ValueError(f"{self._folder} is not this user's private folder; remove it, or give another folder=")
        if shares_store() and (started := torch_private.start_of_process(os.getppid())):
            (self._folder / f"agent.{os.getppid()}.{started}").touch(mode=0o600)
        # without a `load`, older files must not look newer than those of this attempt
        self._generation = max((generation for _, generation in _complete(self._folder)), default=0)
        _open[self._folder] = self
        return {}

    def _gather_from_all(self, call: str, make: Callable[[], Reply]) -> Sequence[Reply]:
        """The messages of all processes, also of other pipelines."""
        found: list[Reply] = []

        def gather(replies: Replies) -> None:
            found.extend(self._gather(replies[self._pipe.rank]))

        replies = self._together(call, make, gather if self._has_replicas else None)
        return found or replies.everywhere

    def _together(self, call: str, make: Callable[[], Reply], collective: Callable[[Replies], None] | None) -> Replies:
        """`Steps.all_gather`; an error in one pipeline is an error in all."""
        shared = shared_call(self._pipe)

        def work(replies: Replies) -> None:
            assert collective is not None
            with shared.collective():
                collective(replies)

        try:
            return self._pipe._steps.all_gather(call, make, work if collective else None, shared)
        except BaseException:  # raised again
            drop_side_group(self._purpose, None)  # a process may still wait in a collective of it
            raise

    def _exchange(self, generation: int) -> None:
        """Send this rank's copy to other hosts, and receive theirs; in a thread."""
        own = self._slots[self._rank]
        others = [slots for rank, slots in self._slots.items() if rank != self._rank]
        try:
            works: list[tuple[int, Any]] = [
                (slots.rank, dist.irecv(slots.memory, slots.rank, group=self._group)) for slots in others
            ]
            works += [(peer, dist.isend(own.memory, peer, group=self._group)) for peer in self._holders]
            for peer, work in works:
                _wait_for(work, f"the copies of generation {generation} were not exchanged with rank {peer}")
        except RuntimeError:  # raised again; for the next MemoryCheckpoint
            drop_side_group(self._purpose, None)
            raise
        for slots in others:
            slots.publish(generation)

    def _find(self, given: Reply) -> Tensor | None:
        """This rank's file of the newest generation that all ranks have and that is not older than the one on disk."""
        files = list(_complete(self._folder))
        visible = _copies(self._folder, files)
        tables = self._gather({**given, "copies": list(visible)})
        if len(paths := sorted({table["path"] for table in tables})) > 1:
            raise ValueError(f"path = {given['path']}: the processes have {paths}; give the same path in all replicas")
        disk = max(table["disk"] for table in tables)
        copies = [[_Copy(*copy) for copy in table["copies"]] for table in tables]
        chosen, memory = -1, None
        for generation in sorted({copy.generation for own in copies for copy in own}, reverse=True):
            usable = [
                {
                    process: copy
                    for process, own in enumerate(copies)
                    for copy in own
                    if (copy.rank, copy.generation, copy.layout) == (rank, generation, wanted["layout"])
                }
                for rank, wanted in enumerate(tables)
            ]
            if {} in usable:
                why = f"rank {usable.index({})} has no copy that fits"
            elif max(copy.steps for copy in usable[0].values()) < disk:
                break
            else:
                memory = self._fetch(usable, visible)
                whole = [answer["whole"] for answer in self._gather({"whole": _is_unaltered(memory)})]
                if all(whole):
                    chosen = generation
                    break
                why = f"the copy of rank {whole.index(False)} is altered"
            logger.warning("generation %d in memory is not used: %s", generation, why)
        self._generation = max(chosen, 0)
        # ranks may have got further than the generation that all have
        for rank, generation in files:
            if generation != chosen:
                (self._folder / f"{rank}-{generation}").unlink(missing_ok=True)
        return memory if chosen >= 0 else None

    def _fetch(self, usable: Sequence[Mapping[int, _Copy]], visible: Mapping[_Copy, Path]) -> Tensor:
        """This rank's file, from its own host or from the first process that has it."""
        works: list[Any] = []
        kept: list[Tensor] = []
        for rank, copies in enumerate(usable):
            source = rank if rank in copies else min(copies)
            copy = copies[source]
            if source == self._rank:
                kept.append(_map(visible[copy], copy.size))
                if rank == self._rank:
                    memory = kept[-1]
                else:
                    works.append(dist.isend(kept[-1], rank, group=self._group))
            elif rank == self._rank:
                memory = torch.empty(copy.size, dtype=torch.uint8)
                works.append(dist.irecv(memory, source, group=self._group))
        for work in works:
            work.wait()
        return memory

    def _read(self, memory: Tensor) -> dict[str, Any]:
        """A state as of `whole_state`, for `restore`."""
        rows, within, text = _read_plain(packing.text_of(memory))
        state = _read_plain(text, [packing.PackedTensor(*place).view(memory) for place in within])
        tensors = {(section, key): packing.PackedTensor(*place).view(memory) for section, key, _, *place in rows}
        saved: dict[str, Any] = dict.fromkeys(state["optimizer"])
        for section, key, shape, *_ in rows:
            if section == "optimizer":
                properties = TensorProperties(dtype=tensors[section, key].dtype)
                saved[key] = TensorStorageMetadata(properties, torch.Size(shape), [])
        optimizer = template(self._optimizers, names_of(self._pipe), saved)
        targets = {"model": self._pipe.to_empty().state_dict(), "optimizer": optimizer}
        for (section, key), tensor in tensors.items():
            if section in targets:
                local_part(targets[section][key]).copy_(tensor)
            else:
                state[section][key] = tensor.clone()
        return {**state, **{section: {**targets[section], **state[section]} for section in targets}}

    def _gather(self, message: Reply) -> list[Reply]:
        """Messages of all processes."""
        return [message] if self._group is None else gather_messages(message, self._group)


def _image(state: Mapping[str, Any], layout: bytes) -> tuple[int, Callable[[Tensor], None]]:
    """What a file is to hold.

    Args:
        state: of `whole_state`.
        layout: its `_layout`.

    Returns:
        The size of the file in bytes, and a function that writes the file's memory.
    """
    sections = {name: section for name, section in state.items() if isinstance(section, dict)}
    found = {(n, k): v for n, section in sections.items() for k, v in section.items() if _has_bytes(v)}
    plain = {n: {k: v for k, v in section.items() if (n, k) not in found} for n, section in sections.items()}
    others, within = _write_plain({**state, **plain})
    tensors = dense_all([*(local_part(value) for value in found.values()), *within])
    places, end = packing.lay_out(tensors, _START)
    rows = [(*key, tuple(v.shape), *place) for (key, v), place in zip(found.items(), places, strict=False)]
    text = pickle.dumps((rows, [tuple(place) for place in places[len(found) :]], others))
    (steps,) = state["steps"]

    def write(memory: Tensor) -> None:
        packing.pack([place.memory(memory) for place in places], tensors)
        packing.write_text(memory, text)
        header = _HEADER.pack(_MAGIC, _sum_of(memory), steps, layout)
        memory[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)

    return -(-packing.size_of(end, text) // _ROUND) * _ROUND, write


def _has_bytes(value: Any) -> bool:
    """Whether it is a tensor that is its bytes, or a DTensor of such; those of a class of its own may be more."""
    return isinstance(value, Tensor) and type(local_part(value)) in (Tensor, nn.Parameter) and _is_copied(value.dtype)


@functools.cache
def _is_copied(dtype: torch.dtype) -> bool:
    """Whether torch copies tensors of it, as `MemoryCheckpoint.load` does; not of int4, for example."""
    try:
        torch.empty(1, dtype=dtype).clone()
    except RuntimeError:
        return False
    return True


def _map(path: Path, size: int) -> Tensor:
    """The memory of a file."""
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
    finally:
        os.close(descriptor)


class _Slots:
    """The two files of a rank's copies on this host.

    Attributes:
        rank: whose copies.
        memory: of the one that is being written.
    """

    memory: Tensor

    def __init__(self, folder: Path, rank: int) -> None:
        self.rank = rank
        self._folder, self._spare = folder, folder / f"{rank}.writing"
        self._mapped: dict[tuple[int, int], Tensor] = {}

    def reserve(self, size: int, kept: int) -> None:
        """Make the older of the two files the one to write, but not of the generation to keep; or a new one.

        Raises:
            OSError: if there is no room.
        """
        done = [generation for rank, generation in _complete(self._folder) if rank == self.rank]
        if len(done) > 1:
            oldest = min(generation for generation in done if generation != kept)
            os.replace(self._folder / f"{self.rank}-{oldest}", self._spare)
        descriptor = os.open(self._spare, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(descriptor).st_size != size:
                self._resize(descriptor, size)
            key = os.fstat(descriptor).st_ino, size
        finally:
            os.close(descriptor)
        if key not in self._mapped:
            self._mapped = dict([*self._mapped.items()][-1:]) | {key: _map(self._spare, size)}
        self.memory = self._mapped[key]

    def _resize(self, descriptor: int, size: int) -> None:
        try:
            # a file with holes would end the process when they cannot be filled; its size grows when all is reserved
            os.posix_fallocate(descriptor, 0, size)
            os.ftruncate(descriptor, size)
        except OSError as error:
            self._spare.unlink(missing_ok=True)
            if error.errno != errno.ENOSPC:
                error.filename = os.fspath(self._spare)
                raise
            free = os.statvfs(self._folder)
            raise OSError(
                errno.ENOSPC,
                f"no room in {self._folder.parent} for a copy of rank {self.rank}: it needs 2 x {size / 1e6:.1f} MB, "
                f"and {free.f_bavail * free.f_frsize / 1e6:.1f} MB are free; give the host or container a larger tmpfs "
                "(docker run --shm-size), or another one by MemoryCheckpoint(folder=)",
            ) from None

    def publish(self, generation: int) -> None:
        """Complete the file that was written."""
        os.rename(self._spare, self._folder / f"{self.rank}-{generation}")


def _wait_for(work: Any, otherwise: str) -> None:
    try:
        work.wait()
    except RuntimeError as error:  # with the other rank, which torch does not name
        text = f"{otherwise}: {first_line(error)}; close this MemoryCheckpoint, and make another one"
        raise RuntimeError(text) from error


def _job() -> str:
    """What tells this job from others, the same after a restart: a word in the store of torchrun's agent, or a name."""
    if shares_store() and dist.is_initialized():
        store = torch_private.default_store()
        while isinstance(store, distributed_c10d.PrefixStore):
            store = store.underlying_store
        return str(store.compare_set("fastpipe/launch", "", secrets.token_hex(16)).decode())
    if (job := job_name()) in ("", "TORCHELASTIC_RUN_ID=none"):
        raise ValueError(
            "name: the job has no name by which a restart finds its copies; start it with torchrun, if need be with "
            "--rdzv-id, or give MemoryCheckpoint(name=), the same after a restart and for no other job"
        )
    return job


def _holders(hosts: Sequence[str], keep: int) -> list[list[int]]:
    """The ranks on other hosts that keep a copy of each rank: those with its number on the next hosts."""
    members: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        members.setdefault(host, []).append(rank)
    names = list(members)
    found = []
    for rank, host in enumerate(hosts):
        first, number = names.index(host) + 1, members[host].index(rank)
        others = [members[name] for name in (names[first:] + names[: first - 1])[: keep - 1]]
        found.append([ranks[number % len(ranks)] for ranks in others])
    return found


class _Copy(NamedTuple):
    """A complete file, with its step count, and `_layout` in hexadecimal."""

    rank: int
    generation: int
    steps: int
    size: int
    layout: str


def _copies(folder: Path, files: Iterable[tuple[int, int]]) -> dict[_Copy, Path]:
    """Those of this version."""
    found = {}
    for rank, generation in files:
        path = folder / f"{rank}-{generation}"
        with path.open("rb") as file:
            text, size = file.read(_HEADER.size), os.fstat(file.fileno()).st_size
        if len(text) == _HEADER.size and size % _ROUND == 0 and text.startswith(_MAGIC):
            _, _, steps, layout = _HEADER.unpack(text)
            found[_Copy(rank, generation, steps, size, layout.hex())] = path
    return found


def _complete(folder: Path) -> Iterable[tuple[int, int]]:
    """The complete files in a folder: rank and generation."""
    for name in os.listdir(folder):
        rank, _, generation = name.partition("-")
        if rank.isdecimal() and generation.isdecimal():
            yield int(rank), int(generation)


def _is_private(folder: Path) -> bool:
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def _remove(folder: Path) -> None:
    """Remove a folder of copies; other processes may do so, too."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            path.unlink(missing_ok=True)
        folder.rmdir()


def _digest(text: str) -> str:
    return hashlib.sha1(text.encode()).hexdigest()[:16]


def _layout(pipe: Pipeline, state: Mapping[str, Any]) -> bytes:
    """A digest of what this rank holds: the model's tensors, which of them are one, and the optimizers' parameters."""
    tensors = [(k, str(v.dtype), list(v.shape)) for k, v in state["model"].items() if isinstance(v, Tensor)]
    groups = [key for key in state["optimizer"] if key.startswith("param_groups.")]
    ties = [tie.names for tie in pipe._local.ties]
    return hashlib.sha1(json.dumps([tensors, ties, sorted(groups)]).encode()).digest()


def _sum_of(memory: Tensor) -> int:
    """Of a file's block, and its size: zeros at the end do not change the sum of the block."""
    return int(bit_sum(memory[_START:])) ^ len(memory)


def _is_unaltered(memory: Tensor) -> bool:
    magic, total, *_ = _HEADER.unpack(bytes(memory[: _HEADER.size].tolist()))
    return bool(magic == _MAGIC and total == _sum_of(memory))


class _PlainReader(pickle.Unpickler):
    """A reader of plain values, and the tensors within them; it imports and calls nothing else."""

    tensors: Sequence[Tensor]

    @staticmethod
    def tensor(tensors: Sequence[Tensor], number: int, device: str) -> Tensor:
        found = tensors[number]
        return found.detach().to(device, copy=True).requires_grad_(found.requires_grad)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (__name__, _PlainReader.tensor.__qualname__):
            tensors = self.tensors  # not self: a reader holds what it has found, in a cycle, and so the file's memory
            return lambda number, device: _PlainReader.tensor(tensors, number, device)
        if module == "collections" and name in ("Counter", "OrderedDict"):  # of learning-rate schedulers
            return super().find_class(module, name)
        raise ValueError(f"has a {module}.{name}, which is not read, since that could execute code")


class _PlainWriter(pickle.Pickler):
    """A writer of what `_PlainReader` reads; it sets the tensors aside."""

    tensors: list[Tensor]

    def reducer_override(self, value: Any) -> Any:
        """Called for all but None, numbers, texts, bytes, tuples, lists, dicts and sets."""
        if isinstance(value, Tensor) and not _is_copied(value.dtype):
            raise ValueError(f"has a tensor of {value.dtype}, which torch does not copy: keep it as torch.uint8")
        if type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided:
            self.tensors.append(value)
            return _PlainReader.tensor, (len(self.tensors) - 1, str(value.device))
        kind = value if isinstance(value, type) else type(value)
        if kind in (Counter, OrderedDict) or value is _PlainReader.tensor:
            return NotImplemented
        raise ValueError(
            f"has a {kind.__module__}.{kind.__qualname__}, which is not copied, since reading it could execute code: "
            "give numbers, texts, dense tensors, tuples, lists and dicts"
        )


def _write_plain(state: Any, where: str = "") -> tuple[bytes, list[Tensor]]:
    """A state as text, and the tensors within its values.

    Raises:
        ValueError: for what could not be loaded, with its place.
    """
    file = io.BytesIO()
    writer = _PlainWriter(file, protocol=5)  # the first one that needs no class for a bytearray
    writer.tensors = []
    try:
        writer.dump(state)
    except Exception as error:  # told, with the place
        for section, values in () if where else state.items():
            for key, value in values.items() if isinstance(values, dict) else [("", values)]:
                _write_plain(value, f"{section}, {key!r}," if key else section)
        why = error if isinstance(error, ValueError) else f"cannot be copied: {error}"
        raise ValueError(f"{where} {why}") from None
    return file.getvalue(), writer.tensors


def _read_plain(text: bytes, tensors: Sequence[Tensor] = ()) -> Any:
    reader = _PlainReader(io.BytesIO(text))
    reader.tensors = tensors
    return reader.load()
