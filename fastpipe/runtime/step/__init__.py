"""One step: agree on the inputs, run the local ranks, gather the outputs.

Promises: a step ends with a result on every rank, or with an error on every rank.
Uses: `executor` and all below, `coordination`.
"""

from __future__ import annotations

from fastpipe.runtime.step.audit import (
    Audit,
    check_audit,
    check_audited,
    computes_on,
    longest_wait,
    why_not_reproducible,
)
from fastpipe.runtime.step.clip import GradNorms, Norm, clip_grad_norm
from fastpipe.runtime.step.inputs import BatchArguments, Request, by_microbatch, input_names
from fastpipe.runtime.step.microbatch import (
    Rules,
    count_rows,
    split,
)
from fastpipe.runtime.step.programs import Programs, options_with_stages
from fastpipe.runtime.step.result import (
    MetricRules,
    StepResult,
    Values,
    added_by_name,
    gather_outputs,
    loss_divisors,
    reduce_metrics,
    weights_of,
)
from fastpipe.runtime.step.steps import Steps
