"""The command ``fastpipe``: schedules listed, shown, simulated, compared, drawn, checked and converted.

What it prints goes to the standard output, as text or, with ``--json``, as one JSON document. Bad input is one line on
the standard error and exit status 2.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from fastpipe.cli.arguments import parser

BAD_INPUT = 2
_INTERRUPTED = 130
_PIPE_CLOSED = 141
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit status: 0, or 2 for bad input.
    """
    if sys.stdout is None:  # closed by the caller
        sys.stdout = io.StringIO()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a file's name may have what the output's encoding has not
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", UserWarning)
            warnings.showwarning = _warn
            parsed = parser().parse_args(arguments)
            parsed.run(parsed)
            sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
        return _PIPE_CLOSED
    except KeyboardInterrupt:
        return _INTERRUPTED
    except (ValueError, TypeError, OSError, ImportError, MemoryError, OverflowError, RecursionError) as error:
        return _fail(error)
    return 0


def _drop_output() -> None:
    """The interpreter flushes the standard output once more at exit, and must not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(error: BaseException) -> int:
    if isinstance(error, OSError) and error.errno in _FULL and not error.filename:
        error.filename = "standard output"  # files are named by `output.writing`
        _drop_output()
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, OSError) and error.filename and error.strerror:
        text = f"{error.filename}: {error.strerror}"
    if isinstance(error, MemoryError):
        text = f"not enough memory ({text}); ask for fewer ranks or microbatches"
    print(f"fastpipe: error: {text}", file=sys.stderr)
    return BAD_INPUT


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"fastpipe: warning: {' '.join(str(message).split())}", file=sys.stderr)
