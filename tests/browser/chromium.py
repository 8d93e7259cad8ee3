"""A headless Chromium, driven over its DevTools pipe: nothing to install besides the browser itself.

As a program it takes a picture of a page:  python -m tests.browser.chromium PAGE.html PICTURE.png [WIDTH HEIGHT]
"""

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
_PATIENCE = 60.0


def find() -> str | None:
    """The browser, or None."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Chromium:
    """A browser with one tab."""

    def __init__(self, profile: Path, width: int = 1400, height: int = 800) -> None:
        # The browser reads commands from descriptor 3 and writes to 4.
        commands, answers = os.pipe(), os.pipe()
        theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (commands[0], answers[1])]
        for fd in (commands[0], answers[1]):
            os.close(fd)
        self._out, self._in = commands[1], answers[0]
        self.process = subprocess.Popen(
            [str(find()), *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            close_fds=False,
            preexec_fn=lambda: [os.dup2(fd, number) for number, fd in enumerate(theirs, start=3)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in theirs:
            os.close(fd)
        self._buffer, self._number, self._session = b"", 0, ""
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._attach(width, height)

    def _attach(self, width: int, height: int) -> None:
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(info["targetId"] for info in targets if info["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._number:
            self._note(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return dict(answer["result"])

    def _receive(self) -> dict[str, Any]:
        until = time.monotonic() + _PATIENCE
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, until - time.monotonic()))
            part = os.read(self._in, 1 << 16) if ready else b""
            if not part:
                raise RuntimeError("the browser does not answer" if not ready else "the browser ended")
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Runtime.exceptionThrown":
            details = event["params"]["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(event["params"]["request"]["url"])

    def open(self, page: Path) -> None:
        """Load a page and wait until it has drawn itself."""
        self.call("Page.navigate", url=page.resolve().as_uri())
        self.wait("document.body && document.body.dataset.drawn")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"]["description"])
        return answer["result"].get("value")

    def wait(self, script: str) -> None:
        """Until an expression is true."""
        until = time.monotonic() + _PATIENCE
        while not self.run(f"Boolean({script})"):
            if time.monotonic() > until:
                raise RuntimeError(f"never true: {script}; errors: {self.errors}")
            time.sleep(0.02)

    def settle(self) -> None:
        """Until what was asked for is on the screen."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """A mouse event of the browser itself, as from a hand."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, x: float, y: float, count: int = 1) -> None:
        """Move there, press, release."""
        self.mouse("mouseMoved", x, y)
        for number in range(1, count + 1):
            self.mouse("mousePressed", x, y, button="left", buttons=1, clickCount=number)
            self.mouse("mouseReleased", x, y, button="left", clickCount=number)
        self.settle()

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Press at one place, release at another."""
        self.mouse("mouseMoved", *start)
        self.mouse("mousePressed", *start, button="left", buttons=1, clickCount=1)
        for step in range(1, 6):
            at = [a + (b - a) * step / 5 for a, b in zip(start, end, strict=True)]
            self.mouse("mouseMoved", *at, button="left", buttons=1)
        self.mouse("mouseReleased", *end, button="left", clickCount=1)
        self.settle()

    def wheel(self, x: float, y: float, turn: float) -> None:
        """Turn the wheel; towards the user is positive."""
        self.mouse("mouseWheel", x, y, deltaX=0, deltaY=turn)
        self.settle()

    def screenshot(self, path: Path) -> Path:
        """A PNG of what is on the screen."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
        return path

    def close(self) -> None:
        """End the browser."""
        with contextlib.suppress(RuntimeError, OSError):
            self._session = ""
            self.call("Browser.close")
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._in)
        os.close(self._out)


@contextlib.contextmanager
def browser(width: int = 1400, height: int = 800) -> Iterator[Chromium]:
    """A browser with a new, empty profile."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        running = Chromium(Path(profile), width, height)
        try:
            yield running
        finally:
            running.close()


if __name__ == "__main__":
    size = [int(value) for value in sys.argv[3:5]] or [1400, 800]
    with browser(*size) as tab:
        tab.open(Path(sys.argv[1]))
        for script in sys.argv[5:]:
            tab.run(script)
        tab.settle()
        tab.screenshot(Path(sys.argv[2]))
