"""A page in real headless Chromium, through the DevTools protocol over a pipe: clicks, keys, requests, errors."""

import base64
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
# Chromium reads from 3 and writes to 4.
START = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
for end, number in zip(ends, (3, 4)):
    os.dup2(end, number)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """`requests` and `errors` are all since the start: addresses asked for, exceptions and refusals of the policy."""

    def __init__(self, *flags: str) -> None:
        if CHROMIUM is None:
            pytest.skip("no chromium here: apt-get install chromium")
        self.profile = TemporaryDirectory(ignore_cleanup_errors=True)
        (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
        start = [sys.executable, "-c", START, str(theirs_in), str(theirs_out)]
        command = [*start, CHROMIUM, *FLAGS, *flags, f"--user-data-dir={self.profile.name}", "about:blank"]
        self.process = subprocess.Popen(command, pass_fds=(theirs_in, theirs_out), stderr=subprocess.DEVNULL)
        os.close(theirs_in)
        os.close(theirs_out)
        self.to, self.of, self.waiting = os.fdopen(ours_out, "wb", 0), ours_in, b""
        self.sent, self.session = 0, None
        self.requests: list[str] = []
        self.errors: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.to.close()
        os.close(self.of)
        self.profile.cleanup()

    def open(self, page: Path, fragment: str = "", width: int = 1280, height: int = 900, dark: bool = False) -> None:
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", features=scheme)
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.send("Page.navigate", url="about:blank")  # else another fragment of the same page would not load it anew
        self.send("Page.navigate", url=page.resolve().as_uri() + fragment)
        self.until("document.readyState === 'complete' && location.protocol === 'file:'")

    def until(self, condition: str, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not self.run(condition):
            assert time.monotonic() < deadline, f"never true: {condition}; {self.errors}"
            time.sleep(0.02)

    def run(self, expression: str) -> Any:
        """In a world of DevTools' own: the page's policy does not hold for it."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def texts(self, selector: str) -> list[str]:
        return self.run(f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.textContent)")

    def key(self, name: str, shift: bool = False) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=name, code=name, modifiers=8 if shift else 0)

    def place(self, selector: str) -> tuple[float, float]:
        """The middle of an element, brought into view."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{found}.scrollIntoView({{block: 'center'}})")
        box = self.run(
            f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])({found}.getBoundingClientRect())"
        )
        return box[0], box[1]

    def hover(self, selector: str) -> None:
        x, y = self.place(selector)
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector: str) -> None:
        x, y = self.place(selector)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def picture(self, file: Path, whole: bool = False) -> None:
        data = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        file.write_bytes(base64.b64decode(data))

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = self._post(method, parameters)
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
            if "method" in answer:
                self._event(answer)

    def _post(self, method: str, parameters: dict[str, Any]) -> int:
        self.sent += 1
        message: dict[str, Any] = {"id": self.sent, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        self.to.write(json.dumps(message).encode() + b"\0")
        return self.sent

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self.waiting:
            more = os.read(self.of, 1 << 20)
            assert more, "chromium ended"
            self.waiting += more
        first, _, self.waiting = self.waiting.partition(b"\0")
        return json.loads(first)

    def _event(self, event: dict[str, Any]) -> None:
        said = event.get("params", {})
        match event["method"]:
            case "Network.requestWillBeSent":
                self.requests.append(said["request"]["url"])
            case "Runtime.exceptionThrown":
                self.errors.append(said["exceptionDetails"].get("exception", {}).get("description", str(said)))
            case "Log.entryAdded":
                self.errors.append(said["entry"]["text"])
            case "Page.javascriptDialogOpening":
                self.errors.append(f"dialog: {said['message']}")
                self._post("Page.handleJavaScriptDialog", {"accept": True})  # the page waits for it
