"""The colours, as people with each kind of colour blindness see them."""

import itertools

import numpy as np
import numpy.typing as npt
import pytest

from fastpipe.visualize.colours import COLOURS, CRITICAL, KINDS, channels, ink, luminance, shade, shades

# Machado, Oliveira and Fernandes 2009, table 1, severity 1.0: linear RGB to linear RGB.
SIGHT = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
WHITE = np.array([0.95047, 1.0, 1.08883])


def lab(colour: str, sight: str) -> npt.NDArray[np.float64]:
    values = np.array(channels(colour)) / 255
    linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(SIGHT[sight]) @ linear, 0, 1)
    x, y, z = (np.cbrt(v) if v > 0.008856 else 7.787 * v + 16 / 116 for v in XYZ @ seen / WHITE)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("num_chunks", [1, 2, 4])
def test_kinds_are_told_apart(sight: str, num_chunks: int) -> None:
    families = {kind: [shade(kind, chunk, num_chunks) for chunk in range(num_chunks)] for kind in KINDS}
    families |= {"comm": [COLOURS["comm"]], "idle": ["#ffffff"]}
    for (one, these), (other, those) in itertools.combinations(families.items(), 2):
        for a, b in itertools.product(these, those):
            assert np.linalg.norm(lab(a, sight) - lab(b, sight)) >= 18, (one, other, a, b)


def test_black_and_white_text_is_read_on_every_bar() -> None:
    for kind, chunk in itertools.product(KINDS, range(2)):
        back = shade(kind, chunk, 2)
        lighter, darker = sorted((luminance(back), luminance(ink(back))), reverse=True)
        assert (lighter + 0.05) / (darker + 0.05) >= 4.5, (kind, chunk)  # WCAG 2, level AA


def test_the_critical_path_has_a_colour_of_its_own() -> None:
    assert all(np.linalg.norm(lab(CRITICAL, "normal") - lab(COLOURS[kind], "normal")) > 30 for kind in COLOURS)


def test_shades_are_the_same_as_colours_and_as_numbers() -> None:
    numbers = shades("F", 3)
    assert numbers.shape == (3, 3)
    assert "#" + "".join(f"{round(255 * v):02x}" for v in numbers[2]) == shade("F", 2, 3)
    assert shade("F", 0, 3) == shade("F", 0, 1) == COLOURS["F"]
