"""A pipeline under Ray Train, one worker for each rank: `python examples/launch/ray_train.py`."""

import ray
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def train(config):
    import ray.train
    from torch import nn

    import fastpipe

    torch.manual_seed(0)
    device = ray.train.torch.get_device()
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(8))).to(device)
    x, target = torch.randn(2, 32, 16, device=device)
    # neither prepare_model nor prepare_data_loader: every worker has its stages, and the same batches
    pipe = fastpipe.Pipeline(layers, "zbv", 8, nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    for step in range(config["steps"]):
        optimizer.zero_grad()
        loss = pipe.step(x, target=target).loss
        optimizer.step()
        print(f"rank {pipe.rank}, step {step}: loss {loss:.6f}")
        ray.train.report({"step": step, "loss": float(loss)})  # by every worker


if __name__ == "__main__":
    gpus = torch.cuda.device_count()
    trainer = TorchTrainer(
        train,
        train_loop_config={"steps": 3},
        torch_config=TorchConfig(backend="nccl" if gpus else "gloo"),
        scaling_config=ScalingConfig(num_workers=2, use_gpu=gpus > 1),
        run_config=RunConfig(name="fastpipe"),
    )
    trainer.fit()
    ray.shutdown()
