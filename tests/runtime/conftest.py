"""What the tests of one process share."""

from typing import Any

import pytest

from fastpipe.runtime import native
from tests import scripts  # noqa: F401 - has had a store of torch's before any test
from tests.conftest import skip_without_native


@pytest.fixture
def extension() -> Any:
    """The native extension."""
    skip_without_native()
    return native.load()


@pytest.fixture
def without_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the native extension had not been built."""
    why = "native extension not loaded: it was never built here; run `make build`"
    monkeypatch.setattr(native, "load", lambda: None)
    monkeypatch.setattr(native, "native_status", lambda: why)
