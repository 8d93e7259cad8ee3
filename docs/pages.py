"""What the scripts share that write pages: blocks between marks, and ``--check``."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path


def with_blocks(text: str, blocks: Mapping[str, Callable[[], str]]) -> str:
    """The page with every block between ``<!-- name -->`` and ``<!-- end -->`` written anew; line breaks beside the
    marks stay.

    Raises:
        KeyError: for a mark that names no block.
    """

    def written(match: re.Match[str]) -> str:
        return f"<!-- {match[1]} -->{match[2]}{blocks[match[1]]()}{match[2]}<!-- end -->"

    return re.sub(r"<!-- (\w+) -->(\n*).*?<!-- end -->", written, text, flags=re.DOTALL)


def finish(page: Path, text: str) -> int:
    """Write the page or, with ``--check``, say whether this is its text; returns the exit status."""
    if "--check" not in sys.argv[1:]:
        page.write_text(text, encoding="utf-8")
        return 0
    is_current = page.exists() and page.read_text(encoding="utf-8") == text
    print(f"{page.name} is current" if is_current else f"{page.name} is not current: run python {sys.argv[0]}")
    return int(not is_current)
