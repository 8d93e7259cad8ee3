"""The text: the sources of the Python standard library that runs this script, read as bytes.

Every machine that runs the example has these megabytes of real text; they need no download and no tokenizer.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

VOCABULARY = 256

NOT_TEXT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3", "encodings"}
"""What is not the standard library, or is (like the code pages in `encodings`) tables rather than text."""

VALIDATION_EVERY = 20


@dataclass(frozen=True)
class Corpus:
    """Bytes to learn from, and bytes of other files to be judged by."""

    training: Tensor
    validation: Tensor

    def to(self, device: torch.device) -> Corpus:
        """The same there; batches are cut out of it where it is."""
        return Corpus(self.training.to(device), self.validation.to(device))


def read_corpus(root: Path | None = None) -> Corpus:
    """Every twentieth file validates. The order of files is that of their paths, so every rank reads the same text."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    files = sorted(_files(root))
    if len(files) < VALIDATION_EVERY:
        raise ValueError(f"{root} holds {len(files)} Python files: too few to learn from and be judged by")
    validation = files[::VALIDATION_EVERY]
    training = [path for number, path in enumerate(files) if number % VALIDATION_EVERY]
    return Corpus(_read(training), _read(validation))


def _files(folder: Path) -> Iterator[Path]:
    """The Python files in a folder, below it, too; what is not text is not even listed: it may be gigabytes."""
    for path in folder.iterdir():
        if path.name in NOT_TEXT:
            continue
        if path.is_dir():
            yield from _files(path)
        elif path.suffix == ".py":
            yield path


def _read(files: list[Path]) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)


def windows(text: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The inputs [rows, length] that begin at ``starts``, and the byte that follows each of their bytes."""
    rows = text[starts[:, None] + torch.arange(length + 1)].long()
    return rows[:, :-1], rows[:, 1:]


def random_batches(text: Tensor, rows: int, length: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches without end. The same seed gives every rank the same ones, so nothing has to be sent around."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield windows(text, torch.randint(len(text) - length, (rows,), generator=generator), length)


def even_batches(text: Tensor, count: int, rows: int, length: int) -> list[tuple[Tensor, Tensor]]:
    """``count`` batches of windows spread evenly over the whole text."""
    starts = torch.linspace(0, len(text) - length - 1, count * rows).long()
    return [windows(text, part, length) for part in starts.split(rows)]


def byte_frequencies(text: Tensor) -> Tensor:
    """How often each byte occurs, [256], summing to 1; every byte is counted once more, so that none is impossible."""
    counts = torch.bincount(text, minlength=VOCABULARY).double() + 1
    return counts / counts.sum()


class Bigram:
    """The yardstick: each byte predicted from the one before it, by how often the pair occurs in the training text."""

    def __init__(self, text: Tensor) -> None:
        pairs = text[:-1].long() * VOCABULARY + text[1:]
        counts = torch.bincount(pairs, minlength=VOCABULARY**2).view(VOCABULARY, VOCABULARY).double()
        # One pair more after every byte, shared out by how often bytes occur at all, so that no loss is infinite.
        smoothed = counts + byte_frequencies(text)
        self.nats = -(smoothed / smoothed.sum(1, keepdim=True)).log()

    def loss(self, batches: list[tuple[Tensor, Tensor]]) -> float:
        """Nats a byte."""
        return sum(float(self.nats[inputs, targets].mean()) for inputs, targets in batches) / len(batches)
