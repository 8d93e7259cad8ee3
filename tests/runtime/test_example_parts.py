"""The parts of examples/train_gpt.py, one by one."""

import importlib
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch):
    """Import a module of the example, as the script does."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module


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
