"""Real processes for tests: the ranks of a Gloo group, started once and given one function after the other.

They are forked from a server that has imported torch already, so that starting four costs a fraction of a second.
Whatever they print is in the error when a test fails; a rank that does not answer in time is shown with the stacks of
its threads, and all are killed.
"""

import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import inspect
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.patience import PATIENCE
from tests.process_state import State
from tests.scripts import SERVER, print_into, start_server

# A pipeline over Gloo has twelve, a mesh of replicas x pipeline six.
_MANY_THREADS = 60


class RankError(AssertionError):
    """What went wrong on the ranks, with their tracebacks and their output."""


class Ranks:
    """Processes that are the ranks of one process group.

    Args:
        size: how many.
        host: who holds the group's store: ``"parent"``, as under torchrun, or ``"first"``, rank 0 itself.
        environment: variables of the processes.
        backend: the group's; None has torch choose.
    """

    def __init__(
        self,
        size: int,
        *,
        host: str = "parent",
        environment: dict[str, str] | None = None,
        backend: str | None = "gloo",
    ) -> None:
        start_server()
        self.size = size
        self._folder = tempfile.TemporaryDirectory(prefix="fastpipe-ranks-")
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._pipes: list[Connection] = []
        self.processes: list[Any] = []
        port = self._store.port if host == "parent" else 0
        for rank in range(size):
            ours, theirs = SERVER.Pipe()
            variables = {**os.environ, **(environment or {})}  # the server has those of an earlier test
            arguments = (rank, size, port, self._log(rank), theirs, variables, backend)
            process = SERVER.Process(target=_serve, args=arguments, daemon=True, name=f"rank {rank}")
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)
            if port == 0:
                port = ours.recv()
        self.run(_joined)

    def _log(self, rank: int) -> str:
        return str(Path(self._folder.name) / f"rank{rank}.txt")

    @property
    def usable(self) -> bool:
        """Whether all of them live, and have few threads.

        A process group ends with its process (that of a DeviceMesh, say), and until then each of its threads looks for
        messages a hundred times a second: of some hundred groups a machine does little else.
        """
        return all(process.is_alive() and _num_threads(process.pid) <= _MANY_THREADS for process in self.processes)

    def start(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Have every rank call a function of a module; `results` waits for them."""
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send((function, args, kwargs))

    def answered(self) -> bool:
        """Whether every rank has finished what was started."""
        return all(pipe.poll() for pipe in self._pipes)

    def results(self, ranks: Sequence[int] | None = None, *, timeout: float = PATIENCE) -> list[Any]:
        """What the ranks returned, in order.

        Raises:
            RankError: when one raised, died or did not answer in time.
        """
        waiting = {self._pipes[rank]: rank for rank in (range(self.size) if ranks is None else ranks)}
        order = list(waiting.values())
        answers: dict[int, Any] = {}
        problems: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(waiting), left):
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    good, answer = pipe.recv()
                except EOFError:
                    good, answer = False, "died"
                (answers if good else problems)[rank] = answer
        problems |= {rank: f"did not answer within {timeout:g} s" for rank in waiting.values()}
        if problems:
            raise RankError(self._story(problems, late=list(waiting.values())))
        return [answers[rank] for rank in order]

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = PATIENCE, **kwargs: Any) -> list[Any]:
        """`start` and `results`."""
        self.start(function, *args, **kwargs)
        return self.results(timeout=timeout)

    def pause(self) -> None:
        """Stop them until `resume`: each thread of a process group looks for messages a hundred times a second."""
        for rank, process in enumerate(self.processes):
            if process.is_alive():
                self.signal(rank, signal.SIGSTOP)

    def resume(self) -> None:
        """Let them go on."""
        for rank, process in enumerate(self.processes):
            if process.is_alive():
                self.signal(rank, signal.SIGCONT)

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a rank a signal."""
        os.kill(self.processes[rank].pid, number)

    def _story(self, problems: dict[int, str], late: Sequence[int]) -> str:
        for rank in late:
            with contextlib.suppress(ProcessLookupError):
                self.signal(rank, signal.SIGUSR1)
        if late:
            time.sleep(0.5)
        parts = [f"rank {rank}: {text}" for rank, text in sorted(problems.items())]
        for rank in range(self.size):
            text = Path(self._log(rank)).read_text(errors="replace").strip()
            parts.append(f"output of rank {rank}:\n{text}" if text else f"rank {rank} printed nothing")
        self.kill()
        return "\n\n".join(["", *parts])

    def kill(self) -> None:
        """End all of them at once."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(10)

    def close(self) -> None:
        """Let them end by themselves; whoever does not is killed, and that is an error."""
        self.resume()
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send(None)
        for process in self.processes:
            process.join(PATIENCE)
        alive = [process.name for process in self.processes if process.is_alive()]
        self.kill()
        self._folder.cleanup()
        assert not alive, f"{alive} did not end"


GroupOf = Callable[[int], Ranks]
"""What the fixture ``group_of`` gives."""


def on_ranks(size: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A test whose body every one of so many ranks runs; its parameters are fixtures' values that can be sent."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        def test(group_of: GroupOf, **given: Any) -> None:
            group_of(size).run(_run_test, function.__module__, function.__name__, given)

        functools.update_wrapper(test, function)
        parameters = inspect.signature(function).parameters.values()
        of_group = inspect.Parameter("group_of", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([of_group, *parameters])  # type: ignore[attr-defined]
        return test

    return decorate


def _run_test(module: str, name: str, given: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(**given)


@contextlib.contextmanager
def ranks(size: int, **options: Any) -> Iterator[Ranks]:
    """Ranks of a test's own, for one that kills or stops some."""
    started = Ranks(size, **options)
    try:
        yield started
    finally:
        started.kill()


def _num_threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def _joined() -> None:
    """Every rank answers this when the group stands."""


def _serve(
    rank: int, size: int, port: int, log: str, pipe: Connection, environment: dict[str, str], backend: str | None
) -> None:
    # one that is stopped would outlive tests that end without a word
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    print_into(log, log)
    faulthandler.enable(sys.stderr)
    faulthandler.register(signal.SIGUSR1, sys.stderr, all_threads=True)
    torch.set_num_threads(1)
    os.environ.clear()
    os.environ.update(environment)
    store = dist.TCPStore("127.0.0.1", port, is_master=port == 0, wait_for_workers=False)
    if port == 0:
        pipe.send(store.port)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    left = False
    # what is there now stays, so that to collect what a test leaves in cycles takes no time
    gc.freeze()
    while not left and (job := _received(pipe)) is not None:
        before = State.now()
        good, answer, left = _call(*job)
        if good and (changed := before.changed(State.now())):
            good, answer = False, "what ran here left behind:\n" + "\n".join(changed)
        pipe.send((good, answer))
        # an exception that a test has caught holds the test's pipeline, whose groups would look for messages for ever;
        # what it closes when it is collected is in cycles of its own, and a thread may hold some for a while.
        # Collections get rarer: one every second in each of a dozen idle ranks keeps a core busy.
        seconds = 0.5
        while not left and not pipe.poll(seconds):
            seconds = 0.0 if gc.collect() else min(max(1.0, 2 * seconds), 8.0)
    dist.destroy_process_group()


def _received(pipe: Connection) -> Any:
    torch.manual_seed(0)  # a module imported with its function may draw: the same on every rank
    return pipe.recv()


def _call(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[bool, Any, bool]:
    """Whether it returned, what it returned or what went wrong, and whether the process is to end."""
    torch.manual_seed(0)  # on every rank the same batches, whatever ran before
    try:
        return True, function(*args, **kwargs), False
    except SystemExit as exit:
        return True, exit.code, True
    except BaseException:
        return False, traceback.format_exc(), False
