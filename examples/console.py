"""What the examples print, on one of the processes that share a terminal."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import fastpipe

QUIET_SECONDS = 10.0
"""Between two progress lines that cannot overwrite each other."""


class Console:
    """Prints on one rank; on the others the same calls do nothing, so that a script need not ask which rank it is."""

    def __init__(self) -> None:
        self.speaks = int(os.environ.get("RANK", "0")) == 0
        self._overwrites = sys.stdout.isatty()
        self._width = min(100, shutil.get_terminal_size((100, 24)).columns)
        self._due = 0.0

    def say(self, text: str = "") -> None:
        if self.speaks:
            print(text, flush=True)

    def fact(self, name: str, text: str) -> None:
        """A name, and in a second column what there is to say about it."""
        lines = [part for line in text.splitlines() for part in textwrap.wrap(line, max(20, self._width - 14))]
        self.say("\n".join(f"  {name if number == 0 else '':<11} {line}" for number, line in enumerate(lines)))

    def quote(self, write: Callable[[], str]) -> None:
        """Text that is not the script's own, behind a bar. It is written only where it is printed."""
        if self.speaks:
            self.say(textwrap.indent(write(), "  | ", lambda line: True))

    def picture(self, timeline: fastpipe.Timeline, path: Path) -> None:
        """Draw a timeline, which every rank has, into one file."""
        if not self.speaks:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.fact("picture", f"{timeline.plot(path)}, the measured step")
        except ImportError as error:
            self.fact("picture", f"none: {error}")

    def progress(self, text: str) -> None:
        """A line that replaces the one before it; where it cannot, a new line every ten seconds."""
        if self._overwrites:
            if self.speaks:
                print(f"\r\033[K  {text[: self._width - 3]}", end="", flush=True)
        elif time.monotonic() >= self._due:
            self._due = time.monotonic() + QUIET_SECONDS
            self.say(f"  {text}")

    def end_progress(self, text: str) -> None:
        """The last of those lines, which stays."""
        self._due = 0.0
        self.progress(text)
        self.say("\n" if self._overwrites else "")
