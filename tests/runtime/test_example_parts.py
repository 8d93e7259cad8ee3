"""The parts of examples/train_gpt.py, one by one."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch):
    """Import a module of the example, as the script does."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module


@pytest.fixture
def text_data(example) -> ModuleType:
    return example("text_data")


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A library of forty files, of which those that are no text of it must not be read."""
    for number in range(40):
        (tmp_path / f"module_{number:02d}.py").write_text(f"value = {number:02d}\n")
    for folder in ("site-packages", "test", "email/tests"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "other.py").write_text("not of the library")
    return tmp_path


def text_of(tensor) -> str:
    return bytes(tensor.tolist()).decode()


def test_every_twentieth_file_validates_and_the_rest_trains(text_data, library):
    corpus = text_data.read_corpus(library)
    assert text_of(corpus.validation) == "value = 00\nvalue = 20\n"
    assert text_of(corpus.training) == "".join(f"value = {n:02d}\n" for n in range(40) if n % 20)


def test_the_bigram_model_is_the_table_of_pairs(text_data):
    text = torch.tensor(list(b"abababac" * 500), dtype=torch.uint8)
    bigram = text_data.Bigram(text)
    assert torch.allclose((-bigram.nats).exp().sum(1), torch.ones(256, dtype=torch.float64))
    assert bigram.nats[ord("a"), ord("b")] == pytest.approx(-math.log(3 / 4), abs=1e-3)
    assert bigram.nats[ord("b"), ord("a")] == pytest.approx(0, abs=1e-2)
    unseen = (torch.tensor([[ord("z")]]), torch.tensor([[ord("q")]]))
    assert math.isfinite(bigram.loss([unseen]))


def small_model(example, **shape):
    gpt_model = example("gpt_model")
    frequencies = torch.full((256,), 1 / 256, dtype=torch.float64)
    return torch.nn.Sequential(*gpt_model.gpt_layers(gpt_model.Shape(**shape), frequencies))


def test_the_model_cannot_look_ahead(example):
    torch.manual_seed(0)
    model = small_model(example, layers=2, width=32, context=16)
    text = torch.randint(256, (1, 16))
    changed = text.clone()
    changed[0, 9] = (text[0, 9] + 1) % 256
    before, after = model(text), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] != after[:, 9:]).any(dim=-1).all()


def test_processes_have_gpus_in_turn_and_a_wish_for_one_that_is_not_there_is_refused(example, monkeypatch):
    own_device = example("training").own_device
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for process in range(4):
        monkeypatch.setenv("LOCAL_RANK", str(process))
        assert own_device("auto") == own_device("cuda") == torch.device("cuda", process % 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="device = 'cuda': torch finds no GPU"):
        own_device("cuda")


def test_only_one_rank_speaks_writes_and_draws(example, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("RANK", "1")
    console = example("console").Console()
    console.fact("name", "text")
    console.quote(lambda: pytest.fail("written where it is not printed"))
    console.picture(None, tmp_path / "folder" / "picture.png")
    console.progress("line")
    console.end_progress("line")
    assert capsys.readouterr().out == "" and not list(tmp_path.iterdir())
