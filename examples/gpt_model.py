"""A small byte-level GPT as a list of layers, which is all that a pipeline needs to know of a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from text_data import VOCABULARY
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """How large the model is."""

    layers: int = 8
    width: int = 160
    context: int = 128
    head_width: int = 32
    history: int = 3

    def __post_init__(self) -> None:
        if self.width % self.head_width or self.width < 1:
            raise ValueError(f"width = {self.width}: use a multiple of {self.head_width}, the width of a head")
        if self.layers < 1 or self.context < 2:
            raise ValueError(f"layers = {self.layers}, context = {self.context}: use at least 1 layer and 2 bytes")


def gpt_layers(shape: Shape, frequencies: Tensor) -> list[nn.Module]:
    """The blocks; the first begins with the embedding, the last ends with the head. So all cost about the same.

    Args:
        shape: how large.
        frequencies: how often each byte occurs, [256], summing to 1; what the model guesses before it learns.
    """
    layers: list[nn.Module] = [Block(shape) for _ in range(shape.layers)]
    layers[0] = nn.Sequential(Embedding(shape), layers[0])
    layers[-1] = nn.Sequential(layers[-1], Head(shape, frequencies))
    return layers


def normalize(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


class Embedding(nn.Module):
    """A table for the byte itself, and one for each of the few bytes before it.

    Attention could find those neighbours too, but would spend half of a short training on learning where they are.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(VOCABULARY, shape.width) for _ in range(1 + shape.history))

    def forward(self, text: Tensor) -> Tensor:
        length = text.shape[1]
        before = F.pad(text, (len(self.tables) - 1, 0))
        shifted = [before[:, len(self.tables) - 1 - back :][:, :length] for back in range(len(self.tables))]
        return sum(table(part) for table, part in zip(self.tables, shifted, strict=True))


class Block(nn.Module):
    """Attention, then a perceptron, each added to what came in; at first they add little."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.attention = Attention(shape)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        nn.init.normal_(self.up.weight, std=0.02)
        nn.init.normal_(self.down.weight, std=0.005)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(normalize(x))
        return x + self.down(F.relu(self.up(normalize(x))).square())


class Attention(nn.Module):
    """Causal attention; positions enter as rotations of queries and keys."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_width = shape.head_width
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        nn.init.normal_(self.qkv.weight, std=0.02)
        nn.init.normal_(self.out.weight, std=0.005)
        cosine, sine = rotations(shape.context, shape.head_width)
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("sine", sine, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, -1, self.head_width))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(self.rotate(query), self.rotate(key), value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def rotate(self, x: Tensor) -> Tensor:
        length = x.shape[-2]
        return x * self.cosine[:length] + x.roll(self.head_width // 2, -1) * self.sine[:length]


def rotations(length: int, width: int) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine [length, width] by which position t turns each pair of a head's channels."""
    speeds = 1000.0 ** (-torch.arange(0, width, 2) / width)
    angles = torch.outer(torch.arange(length), speeds)
    return torch.cat([angles.cos(), angles.cos()], -1), torch.cat([-angles.sin(), angles.sin()], -1)


class Head(nn.Module):
    """Logits of the next byte. They begin at the frequencies, which would otherwise take hundreds of steps to learn."""

    def __init__(self, shape: Shape, frequencies: Tensor) -> None:
        super().__init__()
        self.logits = nn.Linear(shape.width, VOCABULARY)
        nn.init.normal_(self.logits.weight, std=0.01)
        with torch.no_grad():
            self.logits.bias.copy_(frequencies.log())

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(normalize(x))


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """Nats a byte."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def continue_text(model: nn.Module, prompt: str, length: int, context: int, seed: int, temperature: float = 0.7) -> str:
    """Let the whole model write ``length`` bytes after the prompt, one at a time."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.tensor([list(prompt.encode())])
    for _ in range(length):
        logits = model(text[:, -context:])[0, -1] / temperature
        text = torch.cat([text, torch.multinomial(logits.softmax(-1), 1, generator=generator)[None]], 1)
    return bytes(text[0].tolist()).decode(errors="replace")
