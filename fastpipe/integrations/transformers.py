"""Hugging Face's Trainer over a pipeline; a ValueError names an argument that a pipeline cannot follow."""
# mypy: disable-error-code="misc, override, attr-defined, no-untyped-call, union-attr, arg-type"

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import convert_to_fp32
from torch.distributed.checkpoint.state_dict_loader import load
from transformers import Trainer, __version__
from transformers.trainer_pt_utils import find_batch_size
from transformers.trainer_utils import has_length

import fastpipe
from fastpipe.integrations.accelerate import prepare_data_loader

FOLDER = "pipeline"  # in a checkpoint of the Trainer, that of fastpipe
REFUSED = """fp16 torch_compile deepspeed fsdp label_smoothing_factor auto_find_batch_size use_liger_kernel
    parallelism_config bf16_full_eval fp16_full_eval eval_use_gather_object debug torch_empty_cache_steps"""
"""Arguments of the Trainer that would do something to the model, or in a step, that a pipeline would not see."""
REPLACED = """training_step prediction_step _clip_grad_norm _get_grad_norm _load_best_model _wrap_model
    _load_optimizer_and_scheduler _save_optimizer_and_scheduler"""
"""Methods of the Trainer instead of which these here are called."""


class PipelineTrainer(Trainer):
    """`transformers.Trainer` over a pipeline, ``pipe``; ``class Mine(PipelineTrainer, Other)`` for another Trainer.

    Args:
        pipeline: the arguments of `fastpipe.Pipeline`, without layers and loss: ``{"schedule": "zbv"}``,
            with ``"num_ranks"`` in one process, whose threads are the ranks.
        example: a microbatch, for models that `fastpipe.split` splits by an example; with labels, in two or more rows,
            if the model's forward computes the loss in its own way, as encoder-decoders do.
        args, kwargs: as for the Trainer; every process gets the same ``per_device_train_batch_size`` rows.
    """

    def __init__(self, *args: Any, pipeline: dict[str, Any], example: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._check()
        inner = getattr(self.model, "base_model", self.model)
        is_in_layers = type(inner).forward.__qualname__ == "BaseTuner.forward"  # of peft; split refuses its others
        self._whole = inner.model if is_in_layers else self.model
        layers: Any = fastpipe.split(self._whole, **{k: v.to(self.args.device) for k, v in (example or {}).items()})
        scale = self._scale = [1.0]  # not self: the threads of ranks hold the loss function, and would hold the Trainer
        loss_fn, self._num_tokens = layers.loss_fn, layers.num_tokens
        if getattr(loss_fn, "target_is_input", False) and getattr(self.args, "activation_checkpointing", False):
            how = "leave it out, and pass pipeline={'recompute': 'layers'}"  # the recorded forward would not follow it
            raise ValueError(f"activation_checkpointing = True: {how} for a {type(self._whole).__name__}")
        scaled = functools.wraps(loss_fn)(lambda output, labels: loss_fn(output, labels) * scale[0])
        self.pipe = fastpipe.Pipeline(layers, loss_fn=scaled, loss_reduction=layers.num_tokens, **pipeline)
        if self.args.world_size not in (1, self.pipe.num_ranks):
            raise ValueError(f"{self.args.world_size} processes, {self.pipe.num_ranks} ranks: each must have one")
        self._check_optimizer()
        self._local = torch.nn.ModuleList(self.pipe.stage_modules.values())

    def _check(self) -> None:
        for name in REPLACED.split():
            if not hasattr(Trainer, name):
                raise ValueError(f"transformers {__version__} has no Trainer.{name}: use the tested 5.24")
            if getattr(super(PipelineTrainer, type(self)), name) is not getattr(Trainer, name):
                raise ValueError(f"{name} of another Trainer would not be called: derive from one without its own")
        args, own_loss = self.args, getattr(self.compute_loss, "__func__", None) is not Trainer.compute_loss
        optim, sampling = str(args.optim), str(getattr(args, "train_sampling_strategy", ""))
        refused = {name: getattr(args, name, None) for name in REFUSED.split()}
        refused |= {"model_init": self.model_init, "compute_loss_func": self.compute_loss_func}
        refused |= {"compute_loss": own_loss and self.compute_loss}
        refused |= {"label_names": args.label_names != ["labels"] and args.label_names}
        refused |= {"optim": re.search("(?i)lomo|layerwise", optim) and optim}  # these step within the backward
        refused |= {"train_sampling_strategy": args.world_size > 1 and "batch_rebalance" in sampling and sampling}
        refused |= {"enable_jit_checkpoint": args.world_size > 1 and getattr(args, "enable_jit_checkpoint", False)}
        for name in filter(refused.get, refused):
            raise ValueError(f"{name} = {refused[name]!r}: leave it out with a pipeline")
        if args.n_gpu > 1:  # the Trainer multiplies the batch by it
            raise ValueError(f"n_gpu = {args.n_gpu}: one process uses one GPU; hide the others, or use torchrun")

    def _check_optimizer(self) -> None:
        held = {id(p) for group in (self.optimizer.param_groups if self.optimizer else ()) for p in group["params"]}
        if held - {id(p) for p in self.pipe.parameters()}:
            raise ValueError("optimizers: take trainer.pipe.parameters(), and set trainer.optimizer before train()")

    def create_accelerator_and_postprocess(self) -> None:
        """As in the Trainer, but every process gets the same batches, and `gather` returns the process's own values."""
        super().create_accelerator_and_postprocess()
        if self.args.world_size > 1:
            same = functools.partial(prepare_data_loader, accelerator=self.accelerator, seed=self.args.data_seed)
            self.accelerator.prepare_data_loader = lambda loader, *_, **__: same(loader)
            self.accelerator.gather = lambda values: values

    def get_total_train_batch_size(self, args: Any) -> int:
        """The rows of an optimizer's step, the same in every process."""
        return int(args.train_batch_size * args.gradient_accumulation_steps)

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> torch.nn.Module:
        return self._local

    def create_optimizer(self, model: Any = None) -> Any:
        """Make the optimizer of this process's parameters; refuse one of others, which the user has set."""
        self._check_optimizer()
        return super().create_optimizer(self._local)

    def training_step(self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Forward and backward of all ranks, scaled as the Trainer scales a batch of several."""
        model.train()
        self.optimizer.train()  # those without a schedule have modes
        tokens = 1 if num_items_in_batch is None else self._num_tokens(inputs["labels"])
        self._scale[0] = tokens / float(num_items_in_batch or self.current_gradient_accumulation_steps)
        return self._run(self.pipe.step, inputs).loss.to(self.args.device)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        """As the loss counts them: a row with several labels once."""
        counted = super()._get_num_items_in_batch(batch_samples, device)
        return None if counted is None else sum(self._num_tokens(batch["labels"]) for batch in batch_samples)

    def _run(self, call: Any, inputs: Any, **options: Any) -> Any:
        options["num_microbatches"] = min(find_batch_size(inputs), self.pipe.num_microbatches)  # of a last batch, fewer
        with self.compute_loss_context_manager(), self.accelerator.autocast():
            return call(**inputs, **options)

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        """Loss, logits and labels of a batch, in every process."""
        loader = self.accelerator.gradient_state.active_dataloader
        if loader is not None and not has_length(loader.dataset):
            loader.remainder = find_batch_size(inputs)  # of a last batch, by which predictions are cut
        self._scale[0] = 1.0
        result = self._run(self.pipe.eval_step, inputs, gather_outputs=not prediction_loss_only)
        loss = None if result.loss is None else result.loss.to(self.args.device)
        logits = convert_to_fp32(result.outputs)
        if isinstance(logits, dict):
            ignored = getattr(self._whole.config, "keys_to_ignore_at_inference", ["cache"])
            ignored = {*(ignored if ignore_keys is None else ignore_keys), "loss"}
            logits = tuple(value for name, value in logits.items() if name not in ignored and value is not None)
            logits = logits[0] if len(logits) == 1 else logits
        return (loss, None, None) if prediction_loss_only else (loss, logits, inputs.get("labels"))

    def floating_point_ops(self, inputs: Any) -> Any:
        """Of this process, as the Trainer adds those of all."""
        return super().floating_point_ops(inputs) / self.args.world_size

    def _clip_grad_norm(self, model: Any) -> Any:
        return self.pipe.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return self.pipe.clip_grad_norm_(float("inf")) if grad_norm is None else grad_norm

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As the Trainer's; in every process, as each writes its stages."""
        folder = Path(output_dir or self.args.output_dir)
        resumes = _internal_call and not self.args.save_only_model
        extra = {"scheduler": self.lr_scheduler.state_dict()} if resumes else None
        fastpipe.save_checkpoint(folder / FOLDER, self.pipe, self.optimizer.optimizer if resumes else None, extra=extra)
        if self.args.should_save and self.args.world_size > 1:  # this process has an older state of others' stages
            load({"model": self._whole.state_dict()}, checkpoint_id=folder / FOLDER, no_dist=True)
        super().save_model(output_dir, _internal_call)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        pass  # `save_model` has

    def _load_best_model(self) -> None:
        fastpipe.load_checkpoint(Path(self.state.best_model_checkpoint) / FOLDER, self.pipe)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            if not (folder := Path(checkpoint) / FOLDER).is_dir():
                how = "resume it there, or train the model of its from_pretrained with a new optimizer"
                text = f"it has no folder {FOLDER!r}, so it is of a Trainer without a pipeline; {how}"
                raise ValueError(f"resume_from_checkpoint = {str(checkpoint)!r}: {text}")
            extra = fastpipe.load_checkpoint(folder, self.pipe, self.optimizer.optimizer)
            self.lr_scheduler.load_state_dict(extra["scheduler"])
