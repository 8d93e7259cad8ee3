"""torchtitan: a ``pipelining_fn`` for its ``TrainSpec`` (0.2) or ``ModelSpec`` (0.3).

``pipeline_parallel_schedule`` may also name any schedule of fastpipe's with one copy of every stage.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from torch import nn

import fastpipe

_COUNTS = "pipeline_parallel_layers_per_stage or module_fqns_per_model_part"


class PipelineSchedule:
    """What torchtitan's Trainer takes for a schedule. The first call builds the Pipeline, as weights exist then."""

    def __init__(self, build: Callable[..., fastpipe.Pipeline], loss_fn: Callable[..., Any]) -> None:
        arguments: list[Mapping[str, Any]] = [{}]

        def loss(output: Any, target: Any) -> Any:  # without self, or threads of ranks would hold the Pipeline
            value = loss_fn(output, target, **arguments[0])
            return value[0] if isinstance(value, tuple) else value  # 0.3's metrics; its own pipelines drop them, too

        self._loss_kwargs, self._build = arguments, functools.partial(build, loss_fn=loss)

    @functools.cached_property
    def pipe(self) -> fastpipe.Pipeline:
        """The pipeline."""
        return self._build()

    def step(self, *args: Any, finalize_gradients: bool = True, **kwargs: Any) -> None:
        """Forward and backward, with the arguments of torch's schedules.

        Without ``finalize_gradients`` (after 0.3) nothing is reduced over replicas; the next step with it reduces all.
        """
        with contextlib.nullcontext() if finalize_gradients else self.pipe.no_sync():
            self._run(self.pipe.step, args, **kwargs)

    def eval(self, *args: Any, **kwargs: Any) -> None:
        """Forward only."""
        self._run(self.pipe.eval_step, args, **kwargs)

    def _run(
        self,
        call: Callable[..., fastpipe.StepResult],
        args: Sequence[Any],
        *,
        target: Any = None,
        losses: list[Any] | None = None,
        arg_mbs: Sequence[tuple[Any, ...]] | None = None,
        kwarg_mbs: Sequence[Mapping[str, Any]] | None = None,
        target_mbs: Sequence[Any] | None = None,
        loss_kwargs: Mapping[str, Any] | None = None,
        return_outputs: bool = False,  # by torch's default True; none are kept
        **kwargs: Any,
    ) -> None:
        self._loss_kwargs[0] = loss_kwargs or {}
        args = [list(values) for values in zip(*arg_mbs, strict=True)] if arg_mbs else args
        names = dict.fromkeys(name for values in kwarg_mbs or () for name in values)
        # a microbatch without an argument, such as images, gets None
        kwargs |= {name: [values.get(name) for values in kwarg_mbs or ()] for name in names}
        result = call(*args, target=list(target_mbs) if target_mbs else target, **kwargs)
        if losses is not None:
            losses.extend(result.losses or ())


def pipeline(
    model: nn.Module,
    parallel_dims: Any,
    job_config: Any = None,
    device: Any = None,
    model_args: Any = None,
    parallelize_fn: Any = None,
    loss_fn: Any = None,
    **configs: Any,
) -> tuple[PipelineSchedule, list[nn.Module], bool, bool]:
    """A ``pipelining_fn`` of torchtitan: split a model, which may be on the meta device, into this process's stages.

    torchtitan 0.2 passes ``job_config``, later ones ``configs``. The model's forward must skip children that are None,
    and iterate over its ModuleDicts and ModuleLists, in which layers are missing.

    Raises:
        ValueError: naming the option of the configuration, or the child of the model, that is not supported.
    """
    configs.pop("model_config", None)
    settings = {"job_config": job_config} if job_config else configs
    config = job_config or SimpleNamespace(**configs)
    layers = _layers(model, config.parallelism)
    schedule, names = _schedule(config.parallelism, config.training, parallel_dims.pp, layers)
    weights = [set(nn.ModuleList(map(model.get_submodule, part)).parameters()) for part in names]
    if sum(map(len, weights)) > len(set().union(*weights)):  # each stage would have its own copy
        raise ValueError("model: a weight is in several stages; untie it, or take stages that have all its uses")
    enabled = parallel_dims.get_all_one_dimensional_meshes().keys()
    within = sorted(enabled & ({"ep", "etp"} if "ep" in enabled else {"cp", "tp"}))  # where stages run collectives
    mesh, parts = parallel_dims.get_mesh(["pp", *within]), {}
    for index in schedule.placement.stages_of(parallel_dims.get_mesh("pp").get_local_rank()):
        part = _part(model, layers.keys() - set(names[index]))
        parts[index] = parallelize_fn(part, parallel_dims=parallel_dims, **settings)

    build = functools.partial(fastpipe.Pipeline, parts, schedule, loss_reduction="sum", merge=False, mesh=mesh)
    return PipelineSchedule(build, loss_fn), list(parts.values()), 0 in parts, schedule.num_stages - 1 in parts


def _layers(model: nn.Module, parallelism: Any) -> dict[str, int]:
    """What stages have or have not, in the order of the forward, with the layers that torchtitan counts each as."""
    last = parallelism.pipeline_parallel_last_stage_less_layers
    costs = {"norm": 0, "output": last, "lm_head": last}
    costs["tok_embeddings"], found = parallelism.pipeline_parallel_first_stage_less_layers, {}
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleDict | nn.ModuleList):
            keys = child if isinstance(child, nn.ModuleDict) else range(len(child))
            found.update({f"{name}.{key}": 1 for key in keys})
        elif name in costs or parallelism.module_fqns_per_model_part:
            found[name] = costs.get(name, 0)
        else:
            raise ValueError(f"model.{name}: no stage is known for it; set parallelism.module_fqns_per_model_part")
    return found


def _num_microbatches(parallelism: Any, training: Any) -> tuple[float, str]:
    """The number of microbatches, whole or not, and the options that say so."""
    if hasattr(parallelism, "num_pp_microbatches"):  # after 0.3
        return parallelism.num_pp_microbatches, f"num_pp_microbatches = {parallelism.num_pp_microbatches}"
    rows, batch = parallelism.pipeline_parallel_microbatch_size, training.local_batch_size
    return batch / rows, f"pipeline_parallel_microbatch_size = {rows} and training.local_batch_size = {batch}"


def _schedule(parallelism: Any, training: Any, num_ranks: int, layers: dict[str, int]) -> tuple[fastpipe.Schedule, Any]:
    """The schedule, and the names of what each of its stages has."""
    names, (num_microbatches, text) = parallelism.module_fqns_per_model_part, _num_microbatches(parallelism, training)
    per_stage, name = parallelism.pipeline_parallel_layers_per_stage, parallelism.pipeline_parallel_schedule.lower()
    count = len(names) if names else math.ceil(sum(layers.values()) / per_stage) if per_stage else None
    if path := parallelism.pipeline_parallel_schedule_csv:
        schedule = fastpipe.Schedule.from_csv(path).validate()
    else:
        sizes = {"num_ranks": num_ranks, "num_microbatches": int(num_microbatches)}
        schedule = fastpipe.make_schedule(name, **sizes)
        if count not in (None, schedule.num_stages) and count % num_ranks == 0:
            try:
                schedule = fastpipe.make_schedule(schedule.name, **sizes, stages_per_rank=count // num_ranks)
            except ValueError as error:
                raise ValueError(f"{_COUNTS} give {count} stages: {error}") from None
    if schedule.num_microbatches != num_microbatches:
        raise ValueError(f"{text}: {schedule.name} has {schedule.num_microbatches} microbatches")
    if schedule.placement.num_routes > 1:
        raise ValueError(f"pipeline_parallel_schedule = {name!r} has every stage twice: take dualpipev, for example")
    stages = schedule.num_stages
    names = names or [[list(layers)[i] for i in cut] for cut in fastpipe.partition([*layers.values()], stages)]
    if count not in (None, stages):
        raise ValueError(f"{_COUNTS} give {count} stages, and {schedule.name} has {stages} on {num_ranks} ranks")
    surplus = Counter(layer for part in names for layer in part)
    surplus.subtract(layers.keys())
    if wrong := [layer for layer, number in surplus.items() if number]:
        text = f"{wrong} are missing, unknown or given twice; give each of {list(layers)} once"
        raise ValueError(f"module_fqns_per_model_part: {text}")
    return schedule, names


def _part(model: nn.Module, absent: set[str]) -> Any:
    """A copy without these layers; parameters keep their names."""
    part: Any = copy.deepcopy(model)
    for parent, _, key in (name.rpartition(".") for name in absent):
        delattr(part.get_submodule(parent), key) if parent else setattr(part, key, None)  # a pop would number anew
    return part
