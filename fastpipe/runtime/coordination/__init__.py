"""What the processes of a pipeline tell each other beside tensors: messages of all to all, and failures.

Promises: whoever waits for a process that has exited, raised or stopped is told so, or gives up at the timeout.
Uses: `common`.
"""

from __future__ import annotations

from fastpipe.runtime.coordination.agreement import agree, building, prepare_together
from fastpipe.runtime.coordination.control import Alone, Control, Reply, tell
from fastpipe.runtime.coordination.deferred import DeferredResults
from fastpipe.runtime.coordination.host import Identity, RanksPerHost, host_name, identify
from fastpipe.runtime.coordination.processes import Processes

__all__ = [
    "Alone",
    "Control",
    "DeferredResults",
    "Identity",
    "Processes",
    "RanksPerHost",
    "Reply",
    "agree",
    "building",
    "host_name",
    "identify",
    "prepare_together",
    "tell",
]
