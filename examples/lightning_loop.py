"""A LightningModule with a pipeline, in one process or several, which resume from each other's checkpoints.

python examples/lightning_loop.py FOLDER
torchrun --nproc-per-node 2 examples/lightning_loop.py FOLDER --resume CHECKPOINT --epochs 3
"""

import argparse
import os

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fastpipe
from fastpipe.integrations.lightning import PipelineStrategy

PROCESSES = int(os.getenv("WORLD_SIZE", 1))


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False  # the pipeline's step has its backward in it
        self.pipe = None

    def configure_model(self):
        if self.pipe is None:
            torch.manual_seed(0)
            layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(8))).to(self.device)
            ranks = 2 if PROCESSES == 1 else None
            self.pipe = fastpipe.Pipeline(layers, "zbv", 4, nn.functional.mse_loss, num_ranks=ranks)
            self.stages = nn.ModuleList(self.pipe.stage_modules.values())  # for train() and eval()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.pipe.parameters(), lr=0.01)

    def training_step(self, batch, index):
        x, target = batch
        optimizer = self.optimizers()
        loss = self.pipe.step(x, target=target).loss
        self.pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {self.global_step}: loss {loss:.6f}")
        self.log("loss", loss)

    def validation_step(self, batch, index):
        x, target = batch
        self.log("validation", self.pipe.eval_step(x, target=target).loss)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="for checkpoints")
    parser.add_argument("--resume", help="the checkpoint to go on from")
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    data = TensorDataset(*torch.randn(2, 48, 16, generator=torch.Generator().manual_seed(1)))
    trainer = lightning.Trainer(
        max_epochs=options.epochs,
        devices=PROCESSES,
        accelerator="auto",
        strategy=PipelineStrategy(process_group_backend="gloo" if not torch.cuda.is_available() else None),
        use_distributed_sampler=False,  # every rank has the same batches
        default_root_dir=options.folder,
        log_every_n_steps=1,
        enable_progress_bar=False,
        logger=False,
    )
    batches = DataLoader(data, batch_size=16)
    module = Module()
    trainer.fit(module, batches, batches, ckpt_path=options.resume)
    (found,) = trainer.validate(module, batches, verbose=False)
    print(f"validation {found['validation']:.6f}")


if __name__ == "__main__":
    main()
