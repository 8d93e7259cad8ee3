"""Train a small Llama of Hugging Face's transformers over a pipeline, with tied embeddings and padded batches.

    torchrun --standalone --nproc-per-node 4 examples/train_llama.py    four processes, each one rank
    python examples/train_llama.py                                      one process, whose threads are four ranks

The model is randomly initialised from a config, nothing is downloaded. It needs transformers: pip install transformers.
At the end the pipeline's checkpoint is loaded into the plain model, which runs without a pipeline. With --checkpoints,
training goes on from the newest checkpoint in a folder; with torchrun's --max-restarts also after a rank was killed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from text_data import VOCABULARY, read_corpus
from torch import Tensor
from training import DEVICES, own_device, positive, run
from transformers import LlamaConfig, LlamaForCausalLM

import fastpipe

PADDING, END = VOCABULARY, VOCABULARY + 1
IGNORED = -100
CONTEXT, ROWS, MICROBATCHES = 64, 32, 8
SAVE_EVERY = 5


def make_model() -> LlamaForCausalLM:
    """A Llama for bytes, the same on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY + 2,
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=10,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2 * CONTEXT,
        tie_word_embeddings=True,
        use_cache=False,  # a cache is of use when text is written
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=PADDING,
    )
    return LlamaForCausalLM(config)


def padded_batches(text: Tensor, device: torch.device) -> Iterator[dict[str, Tensor]]:
    """Pieces of source of other lengths, as a tokenizer and a collator would make them; the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    while True:
        ids = torch.full((ROWS, CONTEXT), PADDING)
        for row in ids:
            start = int(torch.randint(len(text) - 2 * CONTEXT, (1,), generator=generator))
            length = int(torch.randint(CONTEXT // 4, CONTEXT + 1, (1,), generator=generator))
            row[:length] = text[start : start + length]
            row[length - 1] = END
        mask = (ids != PADDING).long()
        batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, IGNORED)}
        yield {name: part.to(device) for name, part in batch.items()}


def check(pipe: fastpipe.Pipeline, model: LlamaForCausalLM, batch: dict[str, Tensor]) -> str:
    """One step against the unsplit model's: the loss, every gradient and their norm; on CPUs bit for bit."""
    pair = (batch["input_ids"], batch["labels"])
    return str(fastpipe.check_parity(pipe, model, pair, kwargs={"attention_mask": batch["attention_mask"]}))


def train(
    pipe: fastpipe.Pipeline, batches: Iterator[dict[str, Tensor]], num_steps: int, checkpoints: Path | None
) -> None:
    """Train; with a folder of checkpoints, from the newest one on."""
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
    found = fastpipe.latest_checkpoint(checkpoints) if checkpoints else None
    done = fastpipe.load_checkpoint(found, pipe, optimizer)["step"] if found else 0
    if found:
        say(pipe, f"resumed from {found}")
    for step, batch in enumerate(itertools.islice(batches, done, num_steps), done):
        start = time.perf_counter()
        optimizer.zero_grad()
        result = pipe.step(batch["input_ids"], attention_mask=batch["attention_mask"], target=batch["labels"])
        norm = pipe.clip_grad_norm_(1.0)
        optimizer.step()
        seconds = time.perf_counter() - start
        tokens = int(batch["attention_mask"].sum())
        say(pipe, f"step {step:3}  loss {float(result.loss):.4f}  norm {norm:.3f}  {tokens / seconds:6.0f} tokens/s")
        if checkpoints and ((step + 1) % SAVE_EVERY == 0 or step + 1 == num_steps):
            extra = {"step": step + 1}
            fastpipe.save_checkpoint(checkpoints / f"step{step + 1}", pipe, optimizer, extra=extra, keep=2)


def go_on_without(pipe: fastpipe.Pipeline, batch: dict[str, Tensor], folder: Path) -> None:
    """The checkpoint in the plain model: the same loss, and text."""
    loss = (
        pipe.eval().eval_step(batch["input_ids"], attention_mask=batch["attention_mask"], target=batch["labels"]).loss
    )
    fastpipe.save_checkpoint(folder, pipe)
    if pipe.rank:
        return
    plain = make_model().eval()
    state = {"model": plain.state_dict()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    plain.load_state_dict(state["model"])
    with torch.no_grad():
        alone = plain(**{name: part.cpu() for name, part in batch.items()}).loss
        say(pipe, f"the pipeline's loss {float(loss):.4f}; the plain model's, from its checkpoint, {float(alone):.4f}")
        prompt = torch.tensor([list(b"def read")])
        written = plain.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, use_cache=True)
    text = bytes(int(token) for token in written[0] if token < VOCABULARY)
    say(pipe, f"it writes: {text.decode(errors='replace')!r}")


def say(pipe: fastpipe.Pipeline, text: str) -> None:
    if pipe.rank == 0:
        print(text, flush=True)


def shared_folder() -> Path:
    """A new folder, the same on every rank of this machine."""
    chosen = [tempfile.mkdtemp(prefix="train-llama-") if int(os.environ.get("RANK", "0")) == 0 else ""]
    if dist.is_initialized():
        dist.broadcast_object_list(chosen)
    return Path(chosen[0]) / "trained"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Train a small Hugging Face Llama over a pipeline.")
    parser.add_argument("--ranks", type=int, default=int(os.environ.get("WORLD_SIZE", "4")), help="how many ranks")
    parser.add_argument("--schedule", default="zbv", help="how the stages are run")
    parser.add_argument("--steps", type=positive(int), default=25, help="how many optimizer steps")
    parser.add_argument("--device", default="auto", choices=DEVICES, help="a GPU a process, or the CPU")
    parser.add_argument("--checkpoints", type=Path, help="folder to save into, and to go on from if it has some")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)

    device = own_device(given.device)
    model = make_model().to(device)
    layers = fastpipe.split(model)
    batches = padded_batches(read_corpus().training, device)
    first = next(batches)
    pipe = fastpipe.Pipeline(
        layers,
        given.schedule,
        MICROBATCHES,
        layers.loss_fn,
        loss_reduction=layers.num_tokens,
        num_ranks=given.ranks,
        partition="flops",
        example=first["input_ids"][: ROWS // MICROBATCHES],
        merge=False,  # the logits of a whole batch are not needed
    )
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    say(pipe, f"{type(model).__name__}, {millions:.2f} M parameters, {len(layers)} layers; {given.schedule}")
    for line in pipe.describe().splitlines():
        if line.startswith(("ranks", "partition", "tied")):
            say(pipe, line)
    say(pipe, check(pipe, model, first))
    train(pipe, batches, given.steps, given.checkpoints)
    go_on_without(pipe, first, shared_folder())


if __name__ == "__main__":
    run(main)
