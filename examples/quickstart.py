"""The README's quickstart: the same text for one process and for several, on CPUs and on GPUs."""

import os

import torch
from torch import nn

import fastpipe

device = f"cuda:{int(os.getenv('LOCAL_RANK', 0)) % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)  # every process makes the same layers and the same batch
blocks = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()) for _ in range(15)]
model = nn.Sequential(*blocks, nn.Linear(64, 10)).to(device)
pipe = fastpipe.Pipeline(model, "dualpipev", num_microbatches=16, loss_fn=nn.functional.cross_entropy)
optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
x, target = torch.randn(64, 64, device=device), torch.randint(10, (64,), device=device)

for step in range(10):
    optimizer.zero_grad()
    result = pipe.step(x, target=target)
    print(f"rank {pipe.rank}, step {step}: loss {result.loss:.4f}")
    optimizer.step()
