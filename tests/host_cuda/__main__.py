"""Runs a command over CUDA on the host: ``python -m tests.host_cuda COMMAND...``."""

import os
import sys
from pathlib import Path

from tests.host_cuda.build import build, variables

FOLDER = Path(__file__).parents[2] / "build" / "host-cuda"


def main() -> None:
    """Build what is not up to date, and become the command."""
    if not sys.argv[1:]:
        raise SystemExit("which command? As in: python -m tests.host_cuda python -m pytest tests/gpu")
    build(FOLDER)
    os.execvpe(sys.argv[1], sys.argv[1:], os.environ | variables(FOLDER))


if __name__ == "__main__":
    main()
