"""A server that is looked at by plain requests, for the tests of the viewer."""

from __future__ import annotations

import http.client
import json
import struct
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from penstock.view.server import ViewServer


class Visitor:
    """Asks a server as a browser would, or as somebody else would."""

    def __init__(self, server: ViewServer) -> None:
        self.server = server
        self.base = urlsplit(server.url).path

    def ask(
        self,
        path: str,
        method: str = "GET",
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        raw: bool = False,
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        line = http.client.HTTPConnection(*self.server.server_address, timeout=30)
        try:
            line.request(method, path if raw else self.base + path, body, headers or {})
            answer = line.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            line.close()

    def get(self, path: str) -> Any:
        status, _, data = self.ask(path)
        assert status == 200, data
        return json.loads(data)

    def post(self, path: str, value: Any) -> tuple[int, Any]:
        headers = {"Content-Type": "application/json"}
        status, _, data = self.ask(path, "POST", json.dumps(value).encode(), headers)
        return status, json.loads(data)

    def curve(self, path: str) -> tuple[list[str], np.ndarray, np.ndarray]:
        """Return the labels, the times and the values of a curve."""
        status, _, data = self.ask(path)
        assert status == 200, data
        length = struct.unpack_from("<I", data)[0]
        head = json.loads(data[4 : 4 + length])
        numbers = np.frombuffer(data, "<f4", offset=4 + length)
        points, elements = head["points"], len(head["labels"])
        values = numbers[points : points * (1 + elements)].reshape(points, elements)
        return head["labels"], numbers[:points], values
