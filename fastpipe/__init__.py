"""fastpipe: pipeline-parallel training for PyTorch in which a schedule is data, proved before it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastpipe import bounds as bounds
from fastpipe import formulas as formulas
from fastpipe._version import __version__
from fastpipe.action import Action, ActionKind
from fastpipe.api import compare, lower, plot, simulate
from fastpipe.cost import CostModel
from fastpipe.errors import CorruptionError, FastpipeError, ProgramError, ScheduleError, StepError
from fastpipe.hardware_queues import ask_for_queues
from fastpipe.partition import partition
from fastpipe.placement import Placement
from fastpipe.planner import Candidate, LayerCosts, Plan, plan
from fastpipe.program import Channel, ChannelKind, Instruction, Op, Program
from fastpipe.schedule import Schedule
from fastpipe.schedules import list_schedules, make_schedule
from fastpipe.timeline import Span, Timeline
from fastpipe.validate import validate_schedule
from fastpipe.validate_program import validate_program

if TYPE_CHECKING:
    from fastpipe.checkpoint_folder import latest_checkpoint
    from fastpipe.runtime.checkpoint import load_checkpoint, save_checkpoint
    from fastpipe.runtime.grad_scaler import GradScaler
    from fastpipe.runtime.memory_checkpoint import MemoryCheckpoint
    from fastpipe.runtime.model import carry, layer_costs, split
    from fastpipe.runtime.native import native_status
    from fastpipe.runtime.pipeline import Pipeline, StepResult
    from fastpipe.runtime.safetensors import load_safetensors
    from fastpipe.runtime.stage import AddedLosses, add_loss, all_to_all, current
    from fastpipe.testing import check_parity

_LAZY = {
    "GradScaler": "fastpipe.runtime.grad_scaler",
    "MemoryCheckpoint": "fastpipe.runtime.memory_checkpoint",
    "AddedLosses": "fastpipe.runtime.stage",
    "add_loss": "fastpipe.runtime.stage",
    "all_to_all": "fastpipe.runtime.stage",
    "Pipeline": "fastpipe.runtime.pipeline",
    "StepResult": "fastpipe.runtime.pipeline",
    "current": "fastpipe.runtime.stage",
    "carry": "fastpipe.runtime.model",
    "check_parity": "fastpipe.testing",
    "save_checkpoint": "fastpipe.runtime.checkpoint",
    "latest_checkpoint": "fastpipe.checkpoint_folder",
    "layer_costs": "fastpipe.runtime.model",
    "load_checkpoint": "fastpipe.runtime.checkpoint",
    "load_safetensors": "fastpipe.runtime.safetensors",
    "split": "fastpipe.runtime.model",
    "native_status": "fastpipe.runtime.native",
}
"""Names that need torch, or look for it, or locks of files: imported when they are first asked for."""

__all__ = [
    "Action",
    "ActionKind",
    "AddedLosses",
    "Candidate",
    "Channel",
    "ChannelKind",
    "CorruptionError",
    "CostModel",
    "FastpipeError",
    "GradScaler",
    "Instruction",
    "LayerCosts",
    "MemoryCheckpoint",
    "Op",
    "Pipeline",
    "Plan",
    "Placement",
    "Program",
    "ProgramError",
    "Schedule",
    "ScheduleError",
    "Span",
    "StepError",
    "StepResult",
    "Timeline",
    "__version__",
    "add_loss",
    "all_to_all",
    "carry",
    "check_parity",
    "compare",
    "current",
    "latest_checkpoint",
    "layer_costs",
    "list_schedules",
    "load_checkpoint",
    "load_safetensors",
    "lower",
    "make_schedule",
    "native_status",
    "partition",
    "plan",
    "plot",
    "save_checkpoint",
    "simulate",
    "split",
    "validate_program",
    "validate_schedule",
]


# here, as a Pipeline is made long after CUDA has started: of layers on the GPU
ask_for_queues()


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'fastpipe' has no attribute {name!r}")
    from importlib import import_module
    from importlib.util import find_spec

    if name not in ("latest_checkpoint", "native_status") and find_spec("torch") is None:
        raise ImportError(f"fastpipe.{name} needs torch, which is not installed; planning works without it")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
