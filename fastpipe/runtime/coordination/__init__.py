"""Exchanges between the processes of a pipeline beside tensors: small messages, and failures.

Promises: a wait for a process that has exited, raised or stopped ends with a `FailureError`, at the latest at the
timeout.
Uses: `common`.
"""

from __future__ import annotations

from fastpipe.runtime.coordination.control import (
    Control,
    Replies,
    Reply,
    agree,
    building,
    exchange_or_refuse,
    prepare_together,
    sharing_batch,
)
from fastpipe.runtime.coordination.deferred import DeferredResults
from fastpipe.runtime.coordination.host import (
    Cores,
    Identity,
    RanksPerHost,
    check_job,
    find_cores,
    host_name,
    identify,
    job_name,
    name_attempt,
    shares_store,
)
from fastpipe.runtime.coordination.peers import has_exited
from fastpipe.runtime.coordination.processes import Processes, write_failure
