"""Drives a headless Chromium by its DevTools protocol: just enough of WebSocket and of it."""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import struct
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page of a Chromium of its own.

    Attributes:
        problems: What the console had to complain about.
        asked: The addresses that were asked for.
    """

    def __init__(self, profile: Path, width: int = 1280, height: int = 900) -> None:
        program = find_chromium()
        assert program is not None
        words = [
            program,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-dev-shm-usage",
            f"--user-data-dir={profile}",
            f"--window-size={width},{height}",
            "--remote-debugging-port=0",
            "about:blank",
        ]
        self._process = subprocess.Popen(
            words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._line: socket.socket | None = None
        self._buffer = b""
        self._number = 0
        self.problems: list[str] = []
        self.asked: list[str] = []
        try:
            self._connect(profile / "DevToolsActivePort")
            for name in ("Runtime", "Log", "Network", "Page"):
                self.call(f"{name}.enable")
            self.resize(width, height)
        except BaseException:
            self.close()
            raise

    def _connect(self, file: Path) -> None:
        self.until(lambda: file.is_file() and len(file.read_text().split()) >= 2, 30)
        port = int(file.read_text().split()[0])
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list") as answer:
            pages = json.loads(answer.read())
        url = urlsplit(next(p["webSocketDebuggerUrl"] for p in pages if p["type"] == "page"))
        self._line = socket.create_connection(("127.0.0.1", port), timeout=60)
        key = base64.b64encode(os.urandom(16)).decode()
        head = (
            f"GET {url.path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\n"
            f"Connection: Upgrade\r\nSec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        self._line.sendall(head.encode())
        while b"\r\n\r\n" not in self._buffer:
            self._buffer += self._line.recv(65536)
        answer_head, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
        assert b" 101 " in answer_head

    def call(self, method: str, **params: Any) -> Any:
        """Give a command and return its result; events that come meanwhile are noted."""
        self._number += 1
        number = self._number
        self._send(json.dumps({"id": number, "method": method, "params": params}).encode())
        while True:
            message = json.loads(self._receive())
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        method, params = message.get("method", ""), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"])[:400])
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(json.dumps(params["entry"])[:400])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.problems.append(json.dumps(params)[:400])

    def run(self, code: str) -> Any:
        """Evaluate JavaScript in the page; a promise is waited for."""
        result = self.call(
            "Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def key(self, key: str, shift: bool = False) -> None:
        text = key if len(key) == 1 else ""
        for kind in ("keyDown", "keyUp"):
            more = {"text": text} if kind == "keyDown" and text else {}
            modifiers = 8 if shift else 0
            self.call("Input.dispatchKeyEvent", type=kind, key=key, modifiers=modifiers, **more)

    def resize(self, width: int, height: int, mobile: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=mobile,
        )

    def scheme(self, name: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def wait(self, code: str, seconds: float = 30) -> None:
        """Wait until an expression is true in the page."""
        self.until(lambda: bool(self.run(code)), seconds, code)

    @staticmethod
    def until(done: Callable[[], bool], seconds: float, what: str = "") -> None:
        end = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < end, f"waited {seconds} s for {what}"
            time.sleep(0.02)

    def _send(self, data: bytes) -> None:
        assert self._line is not None
        mask = os.urandom(4)
        size = len(data)
        if size < 126:
            head = struct.pack("!BB", 0x81, 0x80 | size)
        elif size < 1 << 16:
            head = struct.pack("!BBH", 0x81, 0x80 | 126, size)
        else:
            head = struct.pack("!BBQ", 0x81, 0x80 | 127, size)
        masked = bytes(byte ^ mask[at % 4] for at, byte in enumerate(data))
        self._line.sendall(head + mask + masked)

    def _receive(self) -> bytes:
        parts = []
        while True:
            first, second = self._take(2)
            size = second & 127
            if size == 126:
                (size,) = struct.unpack("!H", self._take(2))
            elif size == 127:
                (size,) = struct.unpack("!Q", self._take(8))
            data = self._take(size)
            if first & 15 in (0, 1):
                parts.append(data)
                if first & 128:
                    return b"".join(parts)
            elif first & 15 == 8:
                raise ConnectionError("the browser has gone")

    def _take(self, count: int) -> bytes:
        assert self._line is not None
        while len(self._buffer) < count:
            more = self._line.recv(1 << 20)
            if not more:
                raise ConnectionError("the browser has gone")
            self._buffer += more
        data, self._buffer = self._buffer[:count], self._buffer[count:]
        return data

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
        self._process.terminate()
        self._process.wait(20)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
