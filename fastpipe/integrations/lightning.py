"""Lightning: the strategy for a LightningModule with a pipeline, which optimizes manually."""
# Lightning is typed in part only
# mypy: disable-error-code="misc, override, no-untyped-call, no-any-return"

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, Strategy

import fastpipe


class PipelineStrategy(DDPStrategy):
    """One process, or one for each rank: all get the same batches; a checkpoint is a folder of `save_checkpoint`.

    The LightningModule has the `fastpipe.Pipeline` as its attribute ``pipe``, made in ``configure_model``. Pass
    ``use_distributed_sampler=False`` to the Trainer.
    """

    strategy_name = "fastpipe"

    @property
    def pipe(self) -> fastpipe.Pipeline:
        """The pipeline of the LightningModule.

        Raises:
            AttributeError: if it has none, saying where to make it.
        """
        pipe = getattr(self.lightning_module, "pipe", None)
        if not isinstance(pipe, fastpipe.Pipeline):
            raise AttributeError("the LightningModule has no Pipeline: set self.pipe in configure_model")
        return pipe

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Refuse a distributed sampler.

        Raises:
            ValueError: if the Trainer asks for a distributed sampler, which would give every rank other rows.
        """
        raise ValueError("use_distributed_sampler = True: all ranks need the same batches; pass False to the Trainer")

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """The optimizer is loaded with the model."""
        return True

    @property
    def _layer_sync(self) -> None:
        """Lightning sets it for ``sync_batchnorm``."""

    @_layer_sync.setter
    def _layer_sync(self, value: Any) -> None:
        if value is not None:
            raise ValueError("sync_batchnorm = True: the processes have different stages; leave it out")

    def setup(self, trainer: Trainer) -> None:
        """As for one process: a pipeline is no replica, and DDP's would send the stages of rank 0 to the others.

        Raises:
            ValueError: for a setting that would not be followed.
        """
        if trainer.state.fn == "fit" and getattr(self.lightning_module, "automatic_optimization", True):
            raise ValueError(
                "automatic_optimization = True: Lightning would drop the step's gradients; set it to False"
            )
        if getattr(self.precision_plugin, "scaler", None) is not None:
            raise ValueError("precision = '16-mixed': use fastpipe.GradScaler in training_step, or 'bf16-mixed'")
        Strategy.setup(self, trainer)

    def _setup_model(self, model: Any) -> Any:
        return model

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """As in DDP, but a sum is not added up over processes, as all have the same data."""
        return tensor if reduce_op == "sum" else super().reduce(tensor, group, reduce_op)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save the stages of every process, and the rest of Lightning's checkpoint once."""
        optimizers = self.optimizers if "optimizer_states" in checkpoint else None  # not if save_weights_only
        rest = {name: value for name, value in checkpoint.items() if name != "optimizer_states"}
        stages = self._names_of_stages()
        rest["state_dict"] = {name: value for name, value in rest["state_dict"].items() if name not in stages}
        fastpipe.save_checkpoint(filepath, self.pipe, optimizers or None, extra=rest)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load the stages and the optimizer, and return the rest."""
        module: Any = self.lightning_module
        fits = module.trainer.state.fn == "fit"
        rest = fastpipe.load_checkpoint(checkpoint_path, self.pipe, self.optimizers or None if fits else None)
        return {**rest, "optimizer_states": []}

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        """Load what is not in stages, as `load_checkpoint` has loaded these."""
        module: Any = self.lightning_module
        state, stages = module.state_dict(), self._names_of_stages()
        state |= {name: value for name, value in checkpoint["state_dict"].items() if name not in stages}
        module.load_state_dict(state, strict)

    def _names_of_stages(self) -> set[str]:
        """What of the LightningModule's own state is also in stages; it may hold the unsplit model, too."""
        module: Any = self.lightning_module
        stages = set(self.pipe.stage_modules.values())
        held = {id(tensor) for stage in stages for tensor in (*stage.parameters(), *stage.buffers())}
        names = tuple(f"{name}." for name, child in module.named_modules(remove_duplicate=False) if child in stages)
        state = module.state_dict(keep_vars=True)
        return {name for name, value in state.items() if id(value) in held or name.startswith(names)}

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Nothing: `load_checkpoint` has."""
