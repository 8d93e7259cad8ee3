"""Hugging Face's Trainer over a pipeline: clipping, accumulation, a schedule of learning rates, evaluation, resuming.

python examples/hugging_face_trainer.py --folder FOLDER                 two ranks are threads
torchrun --nproc-per-node 2 examples/hugging_face_trainer.py --folder FOLDER
python examples/hugging_face_trainer.py --folder FOLDER --plain         without a pipeline: the same losses
"""

import argparse
import os

import torch
from text_data import read_corpus
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from fastpipe.integrations.transformers import PipelineTrainer


def rows(text, count, length=32):
    """Texts of different lengths, padded."""
    found = []
    for number in range(count):
        ids = text[number * length :][:length].long()
        is_text = torch.arange(length) < length - number % 5
        labels = ids.masked_fill(~is_text, -100)
        found.append({"input_ids": ids, "attention_mask": is_text.long(), "labels": labels})
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True, help="for checkpoints, one every third step")
    parser.add_argument("--schedule", default="zbv")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--resume", help="the folder of a checkpoint to go on from")
    parser.add_argument("--plain", action="store_true", help="without a pipeline")
    options = parser.parse_args()
    arguments = TrainingArguments(
        output_dir=options.folder,
        max_steps=options.steps,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        learning_rate=3e-3,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=3,
        save_steps=3,
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        report_to="none",
    )
    corpus = read_corpus()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        tie_word_embeddings=True,
        use_cache=False,
    )
    common = {
        "model": LlamaForCausalLM(config),
        "args": arguments,
        "train_dataset": rows(corpus.training, 100),
        "eval_dataset": rows(corpus.validation, 20),
    }
    if options.plain:
        trainer = Trainer(**common)
    else:
        ranks = 2 if int(os.getenv("WORLD_SIZE", 1)) == 1 else None
        pipeline = {"schedule": options.schedule, "num_microbatches": 4, "num_ranks": ranks}
        trainer = PipelineTrainer(**common, pipeline=pipeline)
    trainer.train(resume_from_checkpoint=options.resume)


if __name__ == "__main__":
    main()
