"""A loop with Accelerate: it prepares the optimizer and the data; the pipeline runs the model.

python examples/accelerate_loop.py, or torchrun --nproc-per-node 2 examples/accelerate_loop.py: the same losses
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fastpipe
from fastpipe.integrations.accelerate import prepare_data_loader

accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
torch.manual_seed(0)
layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(8))).to(accelerator.device)
data = TensorDataset(*torch.randn(2, 64, 16))


def loss_fn(output, target):
    return nn.functional.mse_loss(output, target) / accelerator.gradient_accumulation_steps


ranks = 2 if accelerator.num_processes == 1 else None
pipe = fastpipe.Pipeline(layers, "zbv", 4, loss_fn, num_ranks=ranks)  # not prepared
optimizer = accelerator.prepare(torch.optim.AdamW(pipe.parameters(), lr=0.01))
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)  # not prepared: it would step once for every process
loader = prepare_data_loader(DataLoader(data, batch_size=16, shuffle=True), accelerator)  # the same in every process

for number, (x, target) in enumerate(loader):
    with accelerator.accumulate(), accelerator.autocast():
        loss = pipe.step(x, target=target).loss
        if accelerator.sync_gradients:
            pipe.clip_grad_norm_(1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    accelerator.print(f"batch {number}: loss {loss:.6f}")
