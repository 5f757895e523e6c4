"""The viewer's server: this machine only, behind a random token, with nothing from elsewhere.

A request names episodes, cameras and frames by number, never a file: no path leads anywhere else.
"""

from __future__ import annotations

import hmac
import json
import os
import re
import secrets
import socket
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np
from typing_extensions import Self

from penstock.core.interrupt import start
from penstock.errors import DataError, PenstockError, UsageError
from penstock.view.listing import Check, page
from penstock.view.marks import Mark, Marks
from penstock.view.model import EpisodeView, Points, Source

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
    "media-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
_MOST_RANGE = 512 << 10  # bytes of one answer: a browser that seeks throws most of them away
_PIECE = 256 << 10
_MOST_BODY = 64 << 10
_MOST_WIDTH = 1920
_OPEN_VIEWS = 8
_MOST_CONNECTIONS = 48
_MOST_DECODING = 3
_IDLE_S = 20.0
_READY_S = 20.0
_SMALL = 300  # episodes that are checked without being asked to


class Viewer:
    """What the server answers from: a source, its marks, and what is open of it.

    Args:
        source: What to show.
        marks: The reviewer's; None if nothing can be marked.
    """

    def __init__(self, source: Source, marks: Marks | None) -> None:
        self.source, self.marks = source, marks
        self.check = Check(source.path if source.can_check else None)
        self.ready = threading.Event()  # the page has drawn everything
        self.decoding = threading.BoundedSemaphore(_MOST_DECODING)
        self._lock = threading.Lock()
        self._views: OrderedDict[int, EpisodeView] = OrderedDict()
        if marks is not None and len(source.rows) <= _SMALL:
            self.check.begin()

    def view(self, index: int) -> EpisodeView:
        """Return an episode; the last few stay open."""
        with self._lock:
            if index not in self._views:
                self._views[index] = self.source.open(index)
                if len(self._views) > _OPEN_VIEWS:
                    self._views.popitem(last=False)
            self._views.move_to_end(index)
            return self._views[index]

    def about(self) -> dict[str, Any]:
        """Return what the page shows at its head."""
        return {
            "name": Path(self.source.path).name or self.source.path,
            "path": self.source.path,
            "kind": self.source.kind,
            "episodes": len(self.source.rows),
            "can_mark": self.marks is not None,
            "marks_file": str(self.marks.path) if self.marks else None,
        }

    def episode(self, index: int) -> dict[str, Any]:
        """Return what the page needs of an episode."""
        mark = self.marks.of(index) if self.marks else Mark()
        return {
            "index": index,
            **self.view(index).to_json(),
            "findings": self.check.findings.of.get(index, []),
            "mark": asdict(mark),
        }

    def close(self) -> None:
        """Let go of everything."""
        self.ready.set()
        self.check.close()
        self.source.close()


class ViewServer(ThreadingHTTPServer):
    """Serves a viewer on 127.0.0.1; use it in a `with` block.

    Args:
        viewer: What to serve.
        port: 0 for any that is free.

    Attributes:
        url: Where the page is, with its token.
    """

    daemon_threads = False
    request_queue_size = 64

    def __init__(self, viewer: Viewer, port: int = 0) -> None:
        self.viewer = viewer
        self.token = secrets.token_urlsafe(24)
        self._connections: set[socket.socket] = set()
        self._guard = threading.Lock()
        super().__init__(("127.0.0.1", port), _Handler)
        port = self.server_address[1]
        self.hosts = (f"127.0.0.1:{port}", f"localhost:{port}")
        self.url = f"http://127.0.0.1:{port}/{self.token}/"
        self._thread = threading.Thread(
            target=self.serve_forever, args=(0.05,), name="penstock-view", daemon=False
        )

    def process_request(self, request: Any, client_address: Any) -> None:
        """Take a connection, unless there are too many."""
        with self._guard:
            full = len(self._connections) >= _MOST_CONNECTIONS
            if not full:
                self._connections.add(request)
        if full:
            super().shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self._guard:
            self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a browser that goes away in the middle is no error."""

    def __enter__(self) -> Self:
        start(self._thread)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.viewer.ready.set()
        self.shutdown()
        with self._guard:
            open_now = list(self._connections)
        for connection in open_now:  # idle ones would keep their threads for a while
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        self.server_close()
        self._thread.join()
        self.viewer.close()


class _Refused(Exception):
    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S
    server: ViewServer

    def do_GET(self) -> None:
        self._answer(self._get)

    do_HEAD = do_GET  # noqa: N815 - http.server's name

    def do_POST(self) -> None:
        self._answer(self._post)

    def version_string(self) -> str:
        return "penstock"

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: the token would be in it."""

    def _answer(self, handle: Callable[[list[str], dict[str, str]], None]) -> None:
        try:
            parts, query = self._checked()
            handle(parts, query)
        except _Refused as refused:
            self._error(refused.status, str(refused))
        except UsageError as error:
            self._error(HTTPStatus.NOT_FOUND, str(error))
        except DataError as error:
            self._error(HTTPStatus.UNPROCESSABLE_ENTITY, str(error))
        except (BrokenPipeError, ConnectionResetError, TimeoutError):
            self.close_connection = True
        except (PenstockError, OSError) as error:
            self._error(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))

    def _checked(self) -> tuple[list[str], dict[str, str]]:
        """Return the parts of the path behind the token, and the query; or refuse."""
        headers, hosts = self.headers, self.server.hosts
        if headers.get_all("Host", []) not in ([hosts[0]], [hosts[1]]):
            raise _Refused(HTTPStatus.FORBIDDEN, "this name of the host is not served")
        origin = headers.get("Origin")
        if origin is not None and origin not in [f"http://{host}" for host in hosts]:
            raise _Refused(HTTPStatus.FORBIDDEN, "another origin")
        site, mode = headers.get("Sec-Fetch-Site"), headers.get("Sec-Fetch-Mode")
        if site not in (None, "none", "same-origin") and mode != "navigate":
            raise _Refused(HTTPStatus.FORBIDDEN, "another site")
        url = urlsplit(self.path)
        _, _, rest = url.path.partition("/")
        token, _, rest = rest.partition("/")
        if not hmac.compare_digest(token.encode(), self.server.token.encode()):
            raise _Refused(HTTPStatus.FORBIDDEN, "open the address that `penstock view` printed")
        fields = parse_qs(url.query, max_num_fields=20)
        return [unquote(part) for part in rest.split("/")], {n: v[-1] for n, v in fields.items()}

    def _get(self, parts: list[str], query: dict[str, str]) -> None:
        viewer = self.server.viewer
        match parts:
            case [""] | ["index.html"]:
                self._page_file("index.html")
            case [name] if name in _page_names():
                self._page_file(name)
            case ["api", "about"]:
                self._json(viewer.about())
            case ["api", "episodes"]:
                self._json(
                    page(
                        viewer.source.rows,
                        viewer.marks,
                        viewer.check.findings,
                        text=query.get("text", "")[:200],
                        order=query.get("order", "index"),
                        down=query.get("down") == "1",
                        which=query.get("which", "all"),
                        first=_number(query.get("first", "0")),
                        count=_number(query.get("count", "200")),
                    )
                )
            case ["api", "episode", number]:
                self._json(viewer.episode(_number(number)))
            case ["api", "events", number]:
                events = viewer.view(_number(number)).events()
                self._json([[e.t_s, e.kind, e.text] for e in events])
            case ["api", "findings"]:
                found = viewer.check.findings
                self._json(
                    {"state": found.state, "general": found.general, "episodes": len(found.of)}
                )
            case ["api", "ready"]:  # a picture that is not there until the page is complete
                viewer.ready.wait(_READY_S)
                self._send(HTTPStatus.OK, "image/gif", b"")
            case ["video", episode, camera]:
                self._video(viewer.view(_number(episode)).video(_number(camera)))
            case ["frame", episode, camera, frame]:
                width = min(max(_number(query.get("width", "640")), 16), _MOST_WIDTH)
                view = viewer.view(_number(episode))
                with viewer.decoding:
                    data = view.picture(_number(camera), _number(frame), width)
                self._send(HTTPStatus.OK, "image/jpeg", data, "private, max-age=600")
            case ["times", episode, camera]:
                times = viewer.view(_number(episode)).times(_number(camera))
                data = np.ascontiguousarray(times, "<f8").tobytes()
                self._send(HTTPStatus.OK, "application/octet-stream", data)
            case ["curve", episode, curve]:
                view = viewer.view(_number(episode))
                with viewer.decoding:
                    points = view.points(_number(curve))
                self._send(HTTPStatus.OK, "application/octet-stream", _curve_bytes(points))
            case _:
                raise _Refused(HTTPStatus.NOT_FOUND, "there is no such page")

    def _post(self, parts: list[str], query: dict[str, str]) -> None:
        viewer = self.server.viewer
        body = self._body()
        match parts:
            case ["api", "mark", number] if viewer.marks is not None:
                mark = viewer.marks.change(_number(number), body)
                self._json(asdict(mark))
            case ["api", "check"] if viewer.marks is not None:
                viewer.check.begin()
                self._json({"state": viewer.check.findings.state})
            case ["api", "ready"]:
                viewer.ready.set()
                self._json({})
            case _:
                raise _Refused(HTTPStatus.NOT_FOUND, "there is no such page")

    def _body(self) -> dict[str, Any]:
        length = self.headers.get("Content-Length", "")
        json_type = self.headers.get_content_type() == "application/json"
        if not re.fullmatch(r"\d{1,9}", length) or not json_type:
            self.close_connection = True
            raise _Refused(HTTPStatus.BAD_REQUEST, "a JSON object of known length is needed")
        if int(length) > _MOST_BODY:
            self.close_connection = True
            raise _Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "the request is too large")
        try:
            found = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise _Refused(HTTPStatus.BAD_REQUEST, "a JSON object is needed")
        return found

    def _page_file(self, name: str) -> None:
        data = (files("penstock.view") / "page" / name).read_bytes()
        self._send(HTTPStatus.OK, _TYPES[Path(name).suffix], data)

    def _json(self, value: Any) -> None:
        data = json.dumps(value, allow_nan=False).encode()
        self._send(HTTPStatus.OK, "application/json", data)

    def _error(self, status: HTTPStatus, reason: str) -> None:
        data = json.dumps({"error": " ".join(reason.split())[:1000]}).encode()
        self._send(status, "application/json", data)

    def _send(self, status: HTTPStatus, kind: str, data: bytes, cache: str = "no-store") -> None:
        self._head(status, kind, len(data), cache)
        if self.command != "HEAD":
            self.wfile.write(data)

    def _head(
        self, status: HTTPStatus, kind: str, length: int, cache: str, *more: tuple[str, str]
    ) -> None:
        self.send_response(status)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", str(length)),
            ("Cache-Control", cache),
            ("Content-Security-Policy", _POLICY),
            ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
            *more,
        ):
            self.send_header(name, value)
        self.end_headers()

    def _video(self, video: Path | BinaryIO) -> None:
        """Send a video file, or a part of it: at most 512 KB of what is asked for."""
        with video.open("rb") if isinstance(video, Path) else video as file:
            size = file.seek(0, os.SEEK_END)
            wanted = _range(self.headers.get("Range"), size)
            if wanted is None:
                first, stop, status = 0, size, HTTPStatus.OK
                more = [("Accept-Ranges", "bytes")]
            else:
                first, stop = wanted
                if first >= stop:
                    reach = ("Content-Range", f"bytes */{size}")
                    status = HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE
                    self._head(status, "video/mp4", 0, "no-store", reach)
                    return
                status = HTTPStatus.PARTIAL_CONTENT
                more = [("Content-Range", f"bytes {first}-{stop - 1}/{size}")]
            self._head(status, "video/mp4", stop - first, "private, max-age=600", *more)
            file.seek(first)
            while first < stop and self.command != "HEAD":
                data = file.read(min(_PIECE, stop - first))
                if not data:  # the file became shorter
                    self.close_connection = True
                    return
                self.wfile.write(data)
                first += len(data)


def _range(text: str | None, size: int) -> tuple[int, int] | None:
    """Return (first, stop) of a range; None for the whole, first >= stop for one that is not."""
    match = re.fullmatch(r"bytes=(\d{0,18})-(\d{0,18})", text or "")
    if match is None or not (match[1] or match[2]):
        return None
    if not match[1]:
        first, last = max(0, size - int(match[2])), size - 1
    else:
        first, last = int(match[1]), int(match[2]) if match[2] else size - 1
    return first, min(last + 1, size, first + _MOST_RANGE)


def _curve_bytes(points: Points) -> bytes:
    """Lay a curve out: the length of a JSON head, the head, then times, lows and highs."""
    head: dict[str, Any] = {"points": len(points.t_s), "labels": points.labels}
    band = points.low is not points.high
    arrays = [points.t_s, points.low, *([points.high] if band else [])]
    text = json.dumps({**head, "band": band}).encode()
    text += b" " * (-len(text) % 4)
    data = b"".join(np.ascontiguousarray(array, "<f4").tobytes() for array in arrays)
    return struct.pack("<I", len(text)) + text + data


def _page_names() -> set[str]:
    found = (files("penstock.view") / "page").iterdir()
    return {entry.name for entry in found if Path(entry.name).suffix in _TYPES}


def _number(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise UsageError(f"{text[:40]!r} is no number")
    return int(text)
