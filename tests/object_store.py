"""A real S3 server on loopback, behind a proxy that counts and injects faults."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "canary-key",
    "AWS_SECRET_ACCESS_KEY": "canary-secret",
    "AWS_DEFAULT_REGION": "us-east-1",
}
BUSY = b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
Fault = Callable[[int, str], str | None]  # number and first line of a request: "503", "reset", …


@dataclass
class Proxy:
    """Passes requests on, one per connection; knows what went through."""

    target: int
    fault: Fault = lambda number, line: None
    requests: list[str] = field(default_factory=list)
    body_bytes: int = 0

    def __post_init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._accepting.join()
        for thread in self._threads:
            thread.join()

    def clear(self) -> None:
        self.requests.clear()
        self.body_bytes = 0

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                thread = threading.Thread(target=self._serve, args=(client,))
                thread.start()
                self._threads.append(thread)

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            client.settimeout(30)
            head = b""
            while b"\r\n\r\n" not in head:
                part = client.recv(65536)
                if not part:
                    return
                head += part
            head, _, body = head.partition(b"\r\n\r\n")
            line = head.partition(b"\r\n")[0].decode()
            with self._lock:
                self.requests.append(line)
                fault = self.fault(len(self.requests), line)
            if fault == "503":
                client.sendall(BUSY)
                return
            if fault == "reset":
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                return
            head = re.sub(rb"(?i)\r\nconnection:[^\r]*", b"", head) + b"\r\nConnection: close"
            with socket.create_connection(("127.0.0.1", self.target), 30) as server:
                server.sendall(head + b"\r\n\r\n" + body)
                self._pump(client, server, fault)

    def _pump(self, client: socket.socket, server: socket.socket, fault: str | None) -> None:
        """Pass bytes both ways until the server is done, or the fault says so."""
        passed, answer = 0, b""
        with selectors.DefaultSelector() as waiting:
            waiting.register(client, selectors.EVENT_READ)
            waiting.register(server, selectors.EVENT_READ)
            while True:
                for key, _ in waiting.select(30):
                    data = key.fileobj.recv(65536)
                    if key.fileobj is client:
                        if not data:
                            return
                        server.sendall(data)
                        continue
                    if not data:
                        return
                    if b"\r\n\r\n" not in answer:
                        answer += data
                        more = len(answer.partition(b"\r\n\r\n")[2])
                    else:
                        more = len(data)
                    with self._lock:
                        self.body_bytes += more
                    passed += more
                    if fault == "cut" and passed > 2000:
                        client.sendall(data[: len(data) // 2])
                        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                        return
                    if fault == "slow":
                        time.sleep(0.3)
                    client.sendall(data)


@contextlib.contextmanager
def s3_server() -> Iterator[tuple[Proxy, Callable[[str, bytes], None]]]:
    """Start moto's S3 server; yield the proxy in front of it, and a function that puts objects."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {**os.environ, **CREDENTIALS}
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    proxy = None
    try:
        deadline_s = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            assert time.monotonic() < deadline_s
            assert server.poll() is None
            time.sleep(0.1)
        proxy = Proxy(port)
        import boto3

        client = boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{port}",
            region_name="us-east-1",
            aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        )
        client.create_bucket(Bucket="bucket")
        yield proxy, lambda key, data: client.put_object(Bucket="bucket", Key=key, Body=data)
    finally:
        if proxy is not None:
            proxy.close()
        server.kill()
        server.wait()
