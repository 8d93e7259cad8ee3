"""Tables of what tests saw, in docs/reliability.md."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"


def write_block(name: str, text: str) -> None:
    """Replace what is between ``<!-- name -->`` and the next ``<!-- end -->``."""
    block = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    page, count = block.subn(lambda match: match[1] + text + match[2], PAGE.read_text())
    assert count == 1, f"{PAGE} has {count} blocks {name}"
    PAGE.write_text(page)
