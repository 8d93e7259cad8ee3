"""Forward and backward of one slice of the model, for one microbatch at a time.

Promises: the bits of the unsplit model; with the extension, weight gradients of linears are deferred to W.
Uses: `model`, `data_parallel`, `common`.
"""

from __future__ import annotations

from fastpipe.runtime.stage.boundary import HeldTensors, TreespecCache, from_tensors, held_tensors, to_tensors
from fastpipe.runtime.stage.context import ContextFactory, Current, check_contexts, current, last_microbatches
from fastpipe.runtime.stage.losses import (
    AddedLosses,
    NoLoss,
    StageWork,
    add_loss,
    checked_loss,
    detached,
    loss_and_metrics,
    loss_arguments,
    names_of,
    returned_loss,
    scale_loss,
    sum_in_order,
)
from fastpipe.runtime.stage.pairs import (
    FUSED,
    IN_ORDER,
    IN_TURNS,
    TOGETHER,
    WAYS,
    all_to_all,
    in_turns,
    make_helper,
    pair_policy,
)
from fastpipe.runtime.stage.random_numbers import PER_MICROBATCH, Generators, RandomNumbers, RngUsage, microbatch_seed
from fastpipe.runtime.stage.stage import Stage, warn_of_unreached_inputs, warn_of_whole_weights
