"""Runs the program of one rank, or of all ranks of this process.

Promises: the native and the Python executor give the same bits; a failure on one rank ends the step on all.
Uses: `stage`, `transport`, `model`, `data_parallel`, `common`.
"""

from __future__ import annotations

from fastpipe.runtime.executor.cuda_graph import RecordedRanks, why_not
from fastpipe.runtime.executor.executor import Executor, NativeExecutor
from fastpipe.runtime.executor.ranks import DeviceEvent, DeviceEvents, LocalRanks, Outcome, Spans, executor_class
