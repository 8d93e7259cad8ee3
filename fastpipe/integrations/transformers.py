"""Hugging Face's Trainer over a pipeline: its loop, arguments, data, schedules and logs.

Replaced is what the Trainer does to a model: its step, the norm of its gradients, evaluation, and checkpoints.
"""
# the Trainer is typed in part only
# mypy: disable-error-code="misc, override, attr-defined, no-untyped-call, union-attr, arg-type"

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate.data_loader import prepare_data_loader
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from transformers import Trainer

import fastpipe

FOLDER = "pipeline"
"""In a checkpoint of the Trainer, that of fastpipe."""
REFUSED = ("fp16", "torch_compile", "deepspeed", "fsdp", "label_smoothing_factor", "auto_find_batch_size")
"""Arguments of the Trainer that would do something to the model, or to the loss, that a pipeline would not see."""
REPLACED = ("_wrap_model", "_clip_grad_norm", "_get_grad_norm", "_save_optimizer_and_scheduler")


class PipelineTrainer(Trainer):
    """`transformers.Trainer` over a pipeline; ``class Mine(PipelineTrainer, Other)`` for a Trainer of another kind.

    Args:
        pipeline: the arguments of `fastpipe.Pipeline`, without layers and loss: ``{"schedule": "zbv",
            "num_microbatches": 4}``; with ``num_ranks`` where ranks are threads of one process.
        args, kwargs: as for the Trainer. The model is split by `fastpipe.split`. Every process gets the same batch, of
            ``per_device_train_batch_size`` rows.

    Attributes:
        pipe: the pipeline.

    Raises:
        ValueError: for an argument of the Trainer that a pipeline cannot follow.
    """

    def __init__(self, *args: Any, pipeline: Mapping[str, Any], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        refused = [name for name in REFUSED if getattr(self.args, name, None)]
        if refused:
            raise ValueError(f"{refused[0]} = {getattr(self.args, refused[0])!r}: leave it out with a pipeline")
        if self.compute_loss_func is not None or type(self).compute_loss is not Trainer.compute_loss:
            raise ValueError("compute_loss_func, compute_loss: a pipeline takes the model's own loss; leave them out")
        missing = [name for name in REPLACED if not hasattr(Trainer, name)]
        if missing:
            raise RuntimeError(f"this release of transformers has no Trainer.{missing[0]}: use the tested one, 5.24")
        layers: Any = fastpipe.split(self.model)
        scale = self._scale = [1.0]  # not self: the threads of ranks hold the loss function, and would hold the Trainer
        self._num_tokens = layers.num_tokens

        @functools.wraps(layers.loss_fn)
        def loss_fn(output: Any, labels: Any) -> Any:
            return layers.loss_fn(output, labels) * scale[0]

        self.pipe = fastpipe.Pipeline(layers, loss_fn=loss_fn, loss_reduction=layers.num_tokens, **pipeline)
        if self.args.world_size not in (1, self.pipe.num_ranks):
            raise ValueError(
                f"{self.args.world_size} processes and {self.pipe.num_ranks} ranks: one rank each is needed"
            )
        self._local = nn.ModuleList(self.pipe.stage_modules.values())

    def create_accelerator_and_postprocess(self) -> None:
        """As the Trainer's; every process has the same batches, and what is gathered of all is its own."""
        super().create_accelerator_and_postprocess()

        def same_for_all(loader: Any, device_placement: Any = None, slice_fn_for_dispatch: Any = None) -> Any:
            return prepare_data_loader(
                loader,
                self.accelerator.device,
                num_processes=1,
                process_index=0,
                put_on_device=True,
                rng_types=list(self.accelerator.rng_types or ()),
                use_seedable_sampler=self.accelerator.use_seedable_sampler,
                data_seed=self.accelerator.dataloader_config.data_seed,
            )

        self.accelerator.prepare_data_loader = same_for_all
        self.accelerator.gather = lambda values: values

    def get_total_train_batch_size(self, args: Any) -> int:
        """The rows of an optimizer's step, of which no process has others."""
        return int(args.train_batch_size * args.gradient_accumulation_steps)

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> nn.Module:
        return self._local

    def create_optimizer(self, model: Any = None) -> Any:
        """As the Trainer's, of this process's parameters."""
        return super().create_optimizer(self._local)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Forward and backward of all ranks, scaled as the Trainer scales a batch of several."""
        model.train()
        if num_items_in_batch is None:
            self._scale[0] = 1 / self.current_gradient_accumulation_steps
        else:
            self._scale[0] = self._num_tokens(inputs["labels"]) / float(num_items_in_batch)
        with self.compute_loss_context_manager():
            loss = self.pipe.step(**inputs).loss
        assert loss is not None
        return loss.to(self.args.device)

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        """Loss, logits and labels of a batch, in every process."""
        self._scale[0] = 1.0
        with self.compute_loss_context_manager():
            result = self.pipe.eval_step(**inputs, gather_outputs=not prediction_loss_only)
        loss = None if result.loss is None else result.loss.to(self.args.device)
        if prediction_loss_only:
            return loss, None, None
        return loss, getattr(result.outputs, "logits", result.outputs), inputs.get("labels")

    def _clip_grad_norm(self, model: Any) -> Any:
        return self.pipe.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return self.pipe.clip_grad_norm_(float("inf")) if grad_norm is None else grad_norm

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As the Trainer's; in every process, as each writes its stages."""
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        resumes = _internal_call and not self.args.save_only_model
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer) if resumes else None
        extra = {"scheduler": self.lr_scheduler.state_dict()} if resumes else None
        fastpipe.save_checkpoint(folder / FOLDER, self.pipe, optimizer, extra=extra)
        if self.args.should_save and self.args.world_size > 1:  # this process has an older state of others' stages
            load({"model": self.model.state_dict()}, checkpoint_id=folder / FOLDER, no_dist=True)
        super().save_model(output_dir, _internal_call)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        pass  # `save_model` has

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
            extra = fastpipe.load_checkpoint(Path(checkpoint) / FOLDER, self.pipe, optimizer)
            self.lr_scheduler.load_state_dict(extra["scheduler"])
