"""From the user's model, or its ``stages``, to the modules of the local stages.

Promises: layers that in sequence return the model's output, or an error with the reason; modules by stage, with the
unsplit model's names; tied weights and copies of a stage have equal gradients.
Uses: `data_parallel`, `common`.
"""

from __future__ import annotations

from fastpipe.runtime.model.chain import (
    FULL,
    NONE,
    Chain,
    Layers,
    Policy,
    accepted_names,
    as_arguments,
    as_inputs,
    as_layers,
    carry,
    check_policy,
    has_own_forward,
    merged_kwargs,
    names_later,
    needed_names,
    passed_on,
    positional_names,
    recompute_of,
    selected,
    split_carried,
    whole,
    with_recompute,
)
from fastpipe.runtime.model.copies import (
    Made,
    StageCopies,
    accumulated,
    check_changes,
    make_copies,
    modules_by_rank,
    own_modules,
    twin,
    with_parameters,
)
from fastpipe.runtime.model.cuts import MEASURED, costs_here, cut_by, cut_text, layer_costs, layer_ranges, restored
from fastpipe.runtime.model.hugging_face import HuggingFaceStage
from fastpipe.runtime.model.modules import (
    NamedTensor,
    RestOfModel,
    Stages,
    Unfilled,
    assignable,
    build_modules,
    check_device,
    check_memory,
    check_spread_alike,
    find_device,
    find_ties,
    flags_of,
    named_parameters,
    prefixes_message,
    prefixes_of,
    skeleton,
    state_prefix,
)
from fastpipe.runtime.model.split import split
from fastpipe.runtime.model.tied import (
    Shared,
    Tie,
    TiedWeights,
    between_ranks,
    check_equal,
    check_same_kinds,
    first_names,
    kinds_of_ties,
    make_tied,
    named_as_held,
    parameter_of,
    share,
    with_all_names,
)
from fastpipe.runtime.model.torch_stages import from_torch, group_of, torch_stages_per_rank
