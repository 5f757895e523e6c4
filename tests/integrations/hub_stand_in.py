"""A server that speaks as much of the Hugging Face Hub's protocol as an upload needs.

Repositories, preupload, Git LFS with basic transfers, commits, tags; kept in memory. It can refuse
the n-th upload, as a network does.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit


class Hub(ThreadingHTTPServer):
    """The hub; use it in a `with` block.

    Attributes:
        files: By path, what the repository holds.
        tags: By name, the commit.
        uploads: The large files that were sent, each time that they were.
        refuse: How many more uploads are taken before one is refused; None for all.
        unknown: Requests that it did not understand.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.repositories: dict[str, dict[str, Any]] = {}
        self.files: dict[str, bytes] = {}
        self.large: dict[str, bytes] = {}
        self.tags: dict[str, str] = {}
        self.uploads: list[str] = []
        self.unknown: list[str] = []
        self.refuse: int | None = None
        self.commits = 0
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,))

    def __enter__(self) -> Hub:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self, value: Any, status: int = 200) -> None:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def do_GET(self) -> None:
        path, hub = urlsplit(self.path).path, self.server
        if path.startswith("/api/datasets/") and "/tree/" in path:
            return self._answer([])
        if path.startswith("/api/datasets/"):
            name = "/".join(path.split("/")[3:5])
            if name in hub.repositories:
                siblings = [{"rfilename": file} for file in hub.files]
                return self._answer(
                    {"id": name, "sha": f"{hub.commits:040d}", "siblings": siblings}
                )
        return self._unknown()

    do_HEAD = do_GET

    def do_POST(self) -> None:
        path, hub, body = urlsplit(self.path).path, self.server, self._body()
        if self.headers.get("Authorization") != "Bearer hf_test":
            return self._answer({"error": "Invalid credentials"}, 401)
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            hub.repositories.setdefault(name, asked)
            return self._answer({"url": f"{hub.url}/datasets/{name}"})
        if "/preupload/" in path:
            files = [
                {
                    "path": one["path"],
                    "uploadMode": "regular" if one["path"].endswith((".md", ".json")) else "lfs",
                    "shouldIgnore": False,
                }
                for one in json.loads(body)["files"]
            ]
            return self._answer({"files": files})
        if path.endswith("/info/lfs/objects/batch"):
            objects = []
            for one in json.loads(body)["objects"]:
                found = {"oid": one["oid"], "size": one["size"]}
                if one["oid"] not in hub.large:
                    href = f"{hub.url}/upload/{one['oid']}"
                    found["actions"] = {"upload": {"href": href, "header": {}}}
                objects.append(found)
            return self._answer({"transfer": "basic", "objects": objects})
        if "/commit/" in path:
            return self._commit(body)
        if "/tag/" in path:
            name = json.loads(body)["tag"]
            if name in hub.tags:
                return self._answer({"error": "it exists"}, 409)
            hub.tags[name] = f"{hub.commits:040d}"
            return self._answer({})
        if path == "/api/validate-yaml":
            return self._answer({"errors": [], "warnings": []})
        return self._unknown()

    def _commit(self, body: bytes) -> None:
        hub = self.server
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                hub.files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                if value["oid"] not in hub.large:
                    return self._answer({"error": f"{value['path']} was not uploaded"}, 400)
                hub.files[value["path"]] = hub.large[value["oid"]]
        hub.commits += 1
        sha = f"{hub.commits:040d}"
        name = "/".join(urlsplit(self.path).path.split("/")[3:5])
        url = f"{hub.url}/datasets/{name}/commit/{sha}"
        return self._answer({"commitUrl": url, "commitOid": sha})

    def do_PUT(self) -> None:
        hub, body = self.server, self._body()
        oid = urlsplit(self.path).path.rpartition("/")[2]
        if hub.refuse is not None and hub.refuse <= 0:
            return self._answer({"error": "no more today"}, 403)
        if hub.refuse is not None:
            hub.refuse -= 1
        assert hashlib.sha256(body).hexdigest() == oid
        hub.large[oid] = body
        hub.uploads.append(oid)
        return self._answer({})

    def do_DELETE(self) -> None:
        name = urlsplit(self.path).path.rpartition("/")[2]
        if self.server.tags.pop(name, None) is None:
            return self._answer({"error": "no such tag"}, 404)
        return self._answer({})

    def _unknown(self) -> None:
        self.server.unknown.append(f"{self.command} {self.path}")
        self._answer({"error": "not found"}, 404)
