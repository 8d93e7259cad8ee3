"""What builds print, and what they write: kept, shortened, and never in halves."""

import contextlib
import os
import re
import shutil
import sys
import threading
from collections.abc import Iterator

# ninja prints a kilobyte a file; a failing command it prints again.
NINJA_STEP = re.compile(r"^(\[\d+/\d+\]) .* -c .*?(csrc/[^\s']+)'? -o .*")


@contextlib.contextmanager
def output_copied_to(lines: list[str]) -> Iterator[None]:
    """Keep a copy of all that this process and the compilers it starts print: they do not say it in an exception."""
    sys.stdout.flush()
    sys.stderr.flush()
    read_end, write_end = os.pipe()
    saved = {fd: os.dup(fd) for fd in (1, 2)}
    for fd in saved:
        os.dup2(write_end, fd)
    os.close(write_end)

    def copy() -> None:
        with os.fdopen(read_end, errors="replace") as stream:
            for line in stream:
                lines.append(line.rstrip())
                os.write(saved[1], NINJA_STEP.sub(r"\1 \2", line).encode())

    reader = threading.Thread(target=copy, daemon=True)
    reader.start()
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for fd, copy_of_fd in saved.items():
            os.dup2(copy_of_fd, fd)
        reader.join(timeout=5)  # a compiler cache's server may keep the pipe open for good


@contextlib.contextmanager
def only_one_build_in(folder: str) -> Iterator[None]:
    """Two builds in one source tree would write the same object files."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def put_in_place(source: str, target: str) -> None:
    """Copy a file at one go: a process that opens or runs the target finds the old one or the new one, never a part."""
    part = f"{target}.{os.getpid()}.part"
    shutil.copy(source, part)
    os.replace(part, target)


def headline(log: list[str], error: Exception) -> str:
    """The one line that says most about a failed build."""
    return next((line for line in log if "error:" in line or "ERROR" in line), f"{type(error).__name__}: {error}")
