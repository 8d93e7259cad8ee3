"""The fake device, loaded into this process: see fake_device.cpp. Before any backward, as torch's engine counts devices
once."""

import importlib.util
import types
from pathlib import Path
from typing import Any

import torch

NAME = "fake"


def load(library: Path) -> Any:
    """Make ``torch.device("fake")`` from the built library; returns its account."""
    spec = importlib.util.spec_from_file_location("fake_device", library)
    assert spec is not None and spec.loader is not None
    account = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(account)
    torch.utils.rename_privateuse1_backend(NAME)
    module = types.ModuleType(f"torch.{NAME}")
    module.is_available = lambda: True  # type: ignore[attr-defined]
    module.is_initialized = lambda: True  # type: ignore[attr-defined]
    module.device_count = lambda: 1  # type: ignore[attr-defined]
    module.current_device = lambda: 0  # type: ignore[attr-defined]
    module._is_in_bad_fork = lambda: False  # type: ignore[attr-defined]
    module.manual_seed_all = lambda seed: None  # type: ignore[attr-defined]
    module.get_amp_supported_dtype = lambda: [torch.bfloat16]  # type: ignore[attr-defined]
    module.default_generators = [torch.default_generator]  # type: ignore[attr-defined]
    torch._register_device_module(NAME, module)
    return account
