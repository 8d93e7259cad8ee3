"""torchtitan's debug Llama under its own Trainer, with a schedule of fastpipe's; also on CPUs.

torchrun --standalone --nproc-per-node 2 examples/torchtitan_llama.py zbv
torchrun --standalone --nproc-per-node 1 examples/torchtitan_llama.py      (without a pipeline)
torchrun --standalone --nproc-per-node 8 examples/torchtitan_llama.py zbv --dp 2 --tp 2      (FSDP2, tensor parallelism)
"""

import argparse
import os
import sys
import tempfile
import zlib
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace
from unittest import mock

import torch

# What torchtitan asks of the module of an accelerator.
CPU = SimpleNamespace(
    set_device=lambda device: None,
    current_device=lambda: 0,
    synchronize=lambda: None,
    get_device_name=lambda device: "CPU",
    get_device_properties=lambda device: SimpleNamespace(total_memory=1),
    memory_stats=lambda device: {},
    reset_peak_memory_stats=lambda: None,
    empty_cache=lambda: None,
)
device = ("cpu", CPU) if not torch.cuda.is_available() else ("cuda", torch.cuda)
if not find_spec("triton"):  # which builds of torch for CPUs have not; torchtitan's kernels for experts need it
    sys.modules["torchtitan.models.moe.kernels"] = mock.MagicMock()
with (  # torchtitan takes "cuda" where it finds no accelerator
    mock.patch("torch._utils._get_available_device_type", lambda: device[0]),
    mock.patch("torch._utils._get_device_module", lambda kind: device[1]),
):
    import torchtitan.tools.utils  # noqa: F401

from datasets import Dataset  # noqa: E402
from text_data import read_corpus  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torch.distributed.tensor import DTensor, distribute_tensor  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import JobConfig  # noqa: E402
from torchtitan.hf_datasets import DatasetConfig, text_datasets  # noqa: E402
from torchtitan.models.llama3 import Transformer, get_train_spec  # noqa: E402
from torchtitan.protocols.train_spec import register_train_spec  # noqa: E402
from torchtitan.tools.logging import init_logger  # noqa: E402
from torchtitan.train import Trainer  # noqa: E402

from fastpipe.integrations.torchtitan import pipeline  # noqa: E402


class Bytes(BaseTokenizer):
    """Text as bytes."""

    def __init__(self):
        super().__init__()
        self.eos_id = 0

    def encode(self, text, **kwargs):
        return list(text.encode()) + [self.eos_id]

    def decode(self, tokens, **kwargs):
        return bytes(tokens).decode(errors="replace")

    def get_vocab_size(self):
        return 256


class Llama(Transformer):
    """Weights that depend on their names alone, so that the same model begins on any number of ranks."""

    def init_weights(self, buffer_device=None):
        super().init_weights(buffer_device)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                own = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                value = torch.randn(parameter.shape, generator=own).to(parameter.device) * 0.02
                if isinstance(parameter, DTensor):
                    value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
                parameter.copy_(value)


def parallelize(model, parallel_dims, job_config):
    """As torchtitan does it; Gloo cannot multiply in a sum, with which torchtitan's FSDP2 does not divide gradients."""
    model = get_train_spec().parallelize_fn(model, parallel_dims, job_config)
    for module in model.modules():
        if isinstance(module, FSDPModule) and device[0] == "cpu":
            module.set_force_sum_reduction_for_comms(True)
    return model


def text(part):
    data = getattr(read_corpus(), part)[: 2**18].numpy().tobytes().decode(errors="replace")
    return Dataset.from_list([{"text": data[i : i + 4096]} for i in range(0, len(data), 4096)])


def config(options, num_ranks, folder):
    config = JobConfig()
    config.job.dump_folder = folder
    config.model.name, config.model.flavor = "llama3_fastpipe", "debugmodel"
    config.training.local_batch_size, config.training.seq_len, config.training.steps = 8, 64, options.steps
    config.training.dataset, config.training.mixed_precision_param = "training", "float32"
    config.validation.enable, config.validation.dataset = True, "validation"
    config.validation.local_batch_size, config.validation.seq_len = 8, 64
    config.validation.freq, config.validation.steps = 3, 2
    config.lr_scheduler.warmup_steps, config.metrics.log_freq = 2, 1
    config.activation_checkpoint.mode = "none"
    config.parallelism.pipeline_parallel_degree = num_ranks
    config.parallelism.pipeline_parallel_schedule = options.schedule
    config.parallelism.data_parallel_shard_degree = options.dp
    config.parallelism.tensor_parallel_degree = options.tp
    config.checkpoint.enable, config.checkpoint.interval = True, 3
    return config


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schedule", nargs="?", default="1F1B")
    parser.add_argument(
        "--dp", type=int, default=1, help="processes over which FSDP2 shards, each with batches of its own"
    )
    parser.add_argument("--tp", type=int, default=1, help="processes of tensor parallelism")
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    if "WORLD_SIZE" not in os.environ:
        parser.error("start it with torchrun, as above")
    num_ranks = int(os.environ["WORLD_SIZE"]) // (options.dp * options.tp)
    for part in ("training", "validation"):
        text_datasets.DATASETS[part] = DatasetConfig(path=part, loader=text, sample_processor=lambda row: row["text"])
    spec = get_train_spec()
    spec = replace(spec, model_cls=Llama, parallelize_fn=parallelize, pipelining_fn=pipeline)
    spec = replace(spec, build_tokenizer_fn=lambda config: Bytes())
    register_train_spec("llama3_fastpipe", spec)
    init_logger()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(config(options, num_ranks, folder))
        trainer.train()
        trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
