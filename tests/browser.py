"""Headless Chromium over its DevTools pipe: what a person and an assistive tool would meet.

No driver and no package: the protocol is JSON messages, each ended by a zero byte, on two pipes.
Source: https://chromedevtools.github.io/devtools-protocol/ and --remote-debugging-pipe.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
DEADLINE_S = 60.0

FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-sandbox",  # Chromium's own does not start for root, and the pages are ours
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
)

# The browser reads from descriptor 3 and writes to 4. Ours are larger, in this order.
ON_3_AND_4 = (
    "import os, sys; read, write, *command = sys.argv[1:]; os.dup2(int(read), 3); "
    "os.dup2(int(write), 4); os.execv(command[0], command)"
)

KEYS = {
    "Tab": 9, "Enter": 13, "Escape": 27, " ": 32, "End": 35, "Home": 36,
    "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40,
}  # fmt: skip


def find_chromium() -> str:
    """The browser on PATH; skips the test where there is none."""
    for name in NAMES:
        found = shutil.which(name)
        if found is not None:
            return found
    pytest.skip(f"no browser on PATH ({', '.join(NAMES)}): apt-get install chromium")


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """A browser of its own, ended with the block. `profile` is a folder for its files."""
    to_read, from_us = os.pipe()
    to_us, to_write = os.pipe()
    command = [sys.executable, "-c", ON_3_AND_4, str(to_read), str(to_write), find_chromium()]
    command += [*FLAGS, f"--user-data-dir={profile}"]
    with (profile.parent / "browser.log").open("wb") as log:
        process = subprocess.Popen(
            command, pass_fds=(to_read, to_write), stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    os.close(to_read)
    os.close(to_write)
    browser = Browser(from_us, to_us)
    try:
        yield browser
        browser.send("Browser.close")
        process.wait(DEADLINE_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(from_us)
        os.close(to_us)


class Browser:
    """The two ends of the pipe. Events are kept in the order in which they come."""

    def __init__(self, write_fd: int, read_fd: int) -> None:
        self._write_fd, self._read_fd = write_fd, read_fd
        self._last = 0
        self._bytes = b""
        self._answers: dict[int, dict[str, Any]] = {}
        self.events: list[dict[str, Any]] = []

    def send(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """The result of one command. Raises RuntimeError with the browser's words."""
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        words = json.dumps(message).encode() + b"\0"
        while words:
            words = words[os.write(self._write_fd, words) :]
        number = self._last
        self.wait(lambda: number in self._answers, method)
        answer = self._answers.pop(number)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def wait(self, done: Callable[[], bool], what: str) -> None:
        """Reads until `done`. Raises TimeoutError after DEADLINE_S."""
        deadline = time.monotonic() + DEADLINE_S
        while not done():
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._read_fd], [], [], left)[0]:
                raise TimeoutError(f"the browser did not answer: {what}")
            piece = os.read(self._read_fd, 1 << 20)
            if not piece:
                raise RuntimeError(f"the browser ended during {what}")
            *messages, self._bytes = (self._bytes + piece).split(b"\0")
            for message in map(json.loads, messages):
                if "id" in message:
                    self._answers[message["id"]] = message
                else:
                    self.events.append(message)

    def page(self, **options: Any) -> Page:
        """A new page, in a context of its own."""
        context = self.send("Target.createBrowserContext")["browserContextId"]
        target = self.send("Target.createTarget", url="about:blank", browserContextId=context)
        attached = self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        return Page(self, attached["sessionId"], **options)


class Page:
    """One page, with what it said and what it asked for recorded from its first byte."""

    def __init__(
        self,
        browser: Browser,
        session: str,
        *,
        width: int = 1280,
        height: int = 900,
        dark: bool = False,
        scripts: bool = True,
    ) -> None:
        self._browser, self._session = browser, session
        for domain in ("Page", "Runtime", "Log", "Network", "DOM", "Accessibility"):
            self.send(f"{domain}.enable")
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.send("Emulation.setEmulatedMedia", features=[scheme, still])
        self.send("Emulation.setScriptExecutionDisabled", value=not scripts)

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """One command to this page."""
        return self._browser.send(method, self._session, **params)

    def events(self, method: str) -> list[dict[str, Any]]:
        """Parameters of every event of one kind so far."""
        return [
            event["params"]
            for event in self._browser.events
            if event["method"] == method and event.get("sessionId") == self._session
        ]

    def resize(self, width: int, height: int) -> None:
        """Sets the window's size in CSS pixels."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip

    def print_media(self, on: bool) -> None:
        """Shows the page as it would be printed, or as it is on the screen."""
        self.send("Emulation.setEmulatedMedia", media="print" if on else "screen")

    def open(self, url: str) -> None:
        """Goes to `url` and waits until it has loaded."""
        self.send("Page.navigate", url=url)
        self._browser.wait(lambda: bool(self.events("Page.loadEventFired")), f"load of {url}")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, evaluated by the tool: page scripts may be off."""
        result = self.send("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{script}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def press(self, *keys: str) -> None:
        """Presses keys as a keyboard would, one after the other."""
        for key in keys:
            text = {"Enter": "\r", " ": " "}.get(key, key if len(key) == 1 else "")
            code = KEYS.get(key, ord(key[0].upper()))
            common = {"key": key, "windowsVirtualKeyCode": code, "nativeVirtualKeyCode": code}
            kind = "keyDown" if text else "rawKeyDown"
            self.send("Input.dispatchKeyEvent", type=kind, text=text, **common)
            self.send("Input.dispatchKeyEvent", type="keyUp", **common)

    def click(self, selector: str) -> None:
        """Presses the mouse in the middle of the first match."""
        box = self.run(
            f"(e => {{ e.scrollIntoView({{block: 'center'}}); const b = e.getBoundingClientRect();"
            f"return [b.x + b.width / 2, b.y + b.height / 2]; }})"
            f"(document.querySelector({json.dumps(selector)}))"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.send(
                "Input.dispatchMouseEvent",
                type=kind,
                x=box[0],
                y=box[1],
                button="left",
                clickCount=1,
            )

    def screenshot(self, *, whole: bool = False) -> bytes:
        """A PNG of the window, or of the whole page."""
        data = self.send("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        return base64.b64decode(data)

    def pdf(self) -> bytes:
        """The page printed on A4."""
        data = self.send(
            "Page.printToPDF", paperWidth=8.27, paperHeight=11.69, printBackground=True,
            preferCSSPageSize=True,
        )["data"]  # fmt: skip
        return base64.b64decode(data)

    def complaints(self) -> list[str]:
        """Console messages, uncaught exceptions and what the browser logged, CSP included."""
        said = [str(event["args"]) for event in self.events("Runtime.consoleAPICalled")]
        said += [str(event["exceptionDetails"]) for event in self.events("Runtime.exceptionThrown")]
        return said + [event["entry"]["text"] for event in self.events("Log.entryAdded")]

    def requests(self) -> list[str]:
        """Every URL that was asked for, but for data inside the page."""
        urls = [event["request"]["url"] for event in self.events("Network.requestWillBeSent")]
        return [url for url in urls if not url.startswith("data:")]
