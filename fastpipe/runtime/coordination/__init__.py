"""Exchanges between the processes of a pipeline beside tensors: small messages, and failures.

Promises: a wait for a process that has exited, raised or stopped ends with a `FailureError`, at the latest at the
timeout.
Uses: `common`.
"""

from __future__ import annotations

from fastpipe.runtime.coordination.agreement import agree, building, prepare_together
from fastpipe.runtime.coordination.attempt import check_job, job_name, name_attempt, shares_store
from fastpipe.runtime.coordination.control import Alone, Control, Reply, exchange_or_refuse
from fastpipe.runtime.coordination.cores import Cores, find_cores
from fastpipe.runtime.coordination.deferred import DeferredResults
from fastpipe.runtime.coordination.host import Identity, RanksPerHost, host_name, identify
from fastpipe.runtime.coordination.mesh import MeshControl
from fastpipe.runtime.coordination.processes import Processes
