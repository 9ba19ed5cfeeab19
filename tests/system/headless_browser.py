"""Debian's Chromium without a window, driven by its own protocol over two pipes: no driver, no further package."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

_WAIT_S = 30.0
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--no-first-run", "--disable-extensions", "--disable-background-networking", "--remote-debugging-pipe"),
)


class BrowserError(Exception):
    """The browser says no, or nothing."""


class Browser:
    """`with Browser(tmp_path) as browser: browser.open(url)`. One page.

    Args:
        profile: An empty folder for it.

    Attributes:
        complaints: What the page's console, its scripts and its content policy complained about.
    """

    def __init__(self, profile: Path) -> None:
        found = shutil.which("chromium")
        assert found, "Chromium is not installed: apt-get install chromium"
        self._program, self._profile = found, profile
        self._buffer = b""
        self._num_sent = 0
        self._session: str | None = None
        self.complaints: list[str] = []

    def __enter__(self) -> Browser:
        theirs_in, self._to = _pipe()
        self._from, theirs_out = _pipe()
        # Its pipes are the descriptors 3 and 4; a shell puts them there.
        command = ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", self._program, *_FLAGS]
        self._process = subprocess.Popen(
            [*command, f"--user-data-dir={self._profile}", "about:blank"],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        os.close(self._to)  # it ends with its pipe
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._from)

    # ------------------------------------------------------------------ what a test does
    def look(self, *, width: int = 1280, height: int = 1000, dark: bool = False, density: float = 1.0) -> None:
        """Take a size and a colour scheme."""
        size = {"width": width, "height": height, "deviceScaleFactor": density, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        """Go somewhere."""
        failure = self.call("Page.navigate", url=url).get("errorText")
        if failure:
            raise BrowserError(f"{url}: {failure}")
        self.wait_until(f"location.href === {url!r} && document.readyState === 'complete'")

    def ask(self, expression: str) -> Any:
        """Return what JavaScript makes of an expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise BrowserError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_until(self, expression: str, seconds: float = _WAIT_S) -> Any:
        """Return what the expression gives once that is true."""
        deadline = time.monotonic() + seconds
        while not (value := self.ask(expression)):
            if time.monotonic() > deadline:
                raise BrowserError(
                    f"waited in vain for {expression}; the page says: {self.ask('document.body.innerText')}"
                )
            time.sleep(0.05)
        return value

    def press(self, key: str) -> None:
        """Press a key, such as Tab or Enter."""
        codes = {"Tab": 9, "Enter": 13}
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=codes[key], **text)

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self.call("Input.insertText", text=text)

    def shoot(self, path: Path) -> Path:
        """Save what the page looks like, all of it."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))
        return path

    # ------------------------------------------------------------------ the protocol
    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result; events that come meanwhile are noted."""
        self._num_sent += 1
        message: dict[str, Any] = {"id": self._num_sent, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive(method)
            if answer.get("id") == self._num_sent:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']['message']}")
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _receive(self, method: str) -> dict[str, Any]:
        deadline = time.monotonic() + _WAIT_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))
            piece = os.read(self._from, 1 << 16) if ready else b""
            if not piece:
                raise BrowserError(f"{method}: {'the browser has ended' if ready else 'no answer'}")
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(params["exceptionDetails"]))
            case "Log.entryAdded":
                entry = params["entry"]
                self.complaints.append(f"{entry['level']} {entry['source']}: {entry['text']} {entry.get('url', '')}")
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.complaints.append(json.dumps(params["args"]))


def _pipe() -> tuple[int, int]:
    """A pipe whose ends are not the low descriptors that the shell is about to set."""
    ends = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return high[0], high[1]
