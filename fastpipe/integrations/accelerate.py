"""Accelerate: batches for a pipeline, whose processes all take the same ones."""
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Any

import accelerate
import torch
from accelerate.data_loader import IterableDatasetShard
from accelerate.data_loader import prepare_data_loader as prepare


def prepare_data_loader(loader: Any, accelerator: accelerate.Accelerator, seed: int | None = None) -> Any:
    """`Accelerator.prepare` for a DataLoader, but every process gets all rows of a batch.

    The order is the same with any number of processes.

    Args:
        loader: a DataLoader, also of an IterableDataset, with the same data in every process.
        accelerator: the script's.
        seed: of a random order for which the loader has no generator, the same in every process; by default that of
            `torch.manual_seed`. An epoch's order depends on it and on ``set_epoch`` of the result.

    Raises:
        ValueError: for a loader that gives every process other rows.
    """
    sampler: Any = loader if getattr(loader, "batch_sampler", None) is None else loader.batch_sampler
    dataset = getattr(loader, "dataset", None)
    parts = [sampler, *([dataset] if isinstance(dataset, IterableDatasetShard) else [])]
    while (inner := getattr(sampler, "sampler", getattr(sampler, "batch_sampler", None))) is not None:
        parts.append(sampler := inner)
    for part in parts:
        count = max(getattr(part, name, None) or 1 for name in ("num_replicas", "num_processes"))
        if count > 1:
            raise ValueError(
                f"loader: its {type(part).__name__} gives each of {count} processes other rows, and all ranks need the "
                "same: leave it out, and use shuffle=True of the DataLoader for a random order"
            )
    if getattr(sampler, "generator", loader) is None:  # torch's own, from which stages draw, too
        first = torch.initial_seed() if seed is None else seed
        sampler.generator = generator = torch.Generator().manual_seed(first)
        sampler.set_epoch = lambda epoch: generator.manual_seed(first + epoch)
    return prepare(
        loader,
        accelerator.device,
        num_processes=1,
        process_index=0,
        put_on_device=True,
        dispatch_batches=False,  # else of an IterableDataset every process gets rows of its own
        rng_types=accelerator.rng_types,
        use_seedable_sampler=accelerator.use_seedable_sampler,
        data_seed=seed,
    )
