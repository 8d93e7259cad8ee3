"""A forked child for tests: what it does, and whether it comes to its end."""

import os
import signal
import time
import traceback
from collections.abc import Callable

from tests.patience import PATIENCE


def in_child(function: Callable[[], object], *, leaves: bool = False) -> int:
    """Call a function in a forked child; its exit status, 0 when nothing was raised, negative when it was killed.

    One that does not end is killed after `PATIENCE` seconds. With ``leaves`` what it raises goes up to the caller.
    """
    child = os.fork()
    if child == 0 and leaves:
        function()
    if child == 0:
        status = 1
        try:
            function()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    deadline = time.monotonic() + PATIENCE
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(ended[1])
