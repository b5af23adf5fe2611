"""Servers on this machine that behave as badly as those of the network do."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Shown:
    """A file that a server shows, and how it fails.

    breaks: bytes after which each of the next connections is closed
    length: the size that it says, if not the right one; status: what it answers instead, each once
    """

    content: bytes = b""
    breaks: list[int] = field(default_factory=list)
    length: int | None = None
    status: list[int] = field(default_factory=list)
    location: str | None = None


class Server(ThreadingHTTPServer):
    """Shows files by their path. asked: (path, Range) of every request"""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.files: dict[str, Shown] = {}
        self.asked: list[tuple[str, str | None]] = []

    def show_dataset(self, name: str, files: Mapping[str, bytes]) -> None:
        """Be a hub with one data set, as huggingface_hub asks for it."""
        api = f"/api/datasets/{name}"
        siblings = [{"rfilename": path} for path in files]
        about = {"id": name, "sha": COMMIT, "siblings": siblings, "tags": []}
        for place in ("", "/revision/main", f"/revision/{COMMIT}"):
            self.files[f"{api}{place}"] = Shown(json.dumps(about).encode())

        folders = {path.rpartition("/")[0] for path in files} | {""}
        entries: list[dict[str, Any]] = [
            {"type": "directory", "path": folder, "oid": "0" * 40} for folder in folders - {""}
        ]
        for path, content in files.items():
            sha256, size = hashlib.sha256(content).hexdigest(), len(content)
            lfs = {"oid": sha256, "size": size, "pointerSize": 130}
            entries.append(
                {"type": "file", "path": path, "size": size, "oid": "0" * 40, "lfs": lfs}
            )
            for revision in (COMMIT, "main"):
                self.files[f"/datasets/{name}/resolve/{revision}/{path}"] = Shown(content)
        for folder in folders:
            inside = [entry for entry in entries if f"{entry['path']}".startswith(folder)]
            inside = [entry for entry in inside if entry["path"] != folder]
            place = f"{api}/tree/{COMMIT}/{folder}".rstrip("/")
            self.files[place] = Shown(json.dumps(inside).encode())

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address) -> None:
        """Nothing on stderr: clients are killed."""


@contextmanager
def served() -> Iterator[Server]:
    server = Server()
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


class _Answer(BaseHTTPRequestHandler):
    server: Server

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        byte_range = self.headers.get("Range")
        path = self.path.partition("?")[0]
        self.server.asked.append((path, byte_range))
        shown = self.server.files.get(path)
        if shown is None or shown.status:
            # What the hub says of a path that it does not have.
            dataset = "/".join(path.removeprefix("/api").split("/")[:4])
            is_known = f"/api{dataset}" in self.server.files
            missing = "RevisionNotFound" if "/revision/" in path else "EntryNotFound"
            missing = missing if is_known else "RepoNotFound"
            self._head(shown.status.pop(0) if shown else 404, 0, {"X-Error-Code": missing})
        elif shown.location is not None:
            self._head(302, 0, {"Location": shown.location})
        else:
            self._send(shown, byte_range)

    def _head(self, status: int, length: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def _send(self, shown: Shown, byte_range: str | None) -> None:
        tag = f'"{hashlib.sha256(shown.content).hexdigest()}"'
        whole = len(shown.content)
        start, end = 0, whole
        if byte_range and self.headers.get("If-Range", tag) == tag:
            first, last = byte_range.removeprefix("bytes=").split("-")
            start, end = int(first), min(whole, int(last or whole) + 1)
        body = shown.content[start:end]
        if start and not body:
            self._head(416, 0, {"Content-Range": f"bytes */{whole}"})
            return
        headers = {"X-Repo-Commit": COMMIT, "ETag": tag}
        if len(body) < whole:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{whole}"
        length = len(body) if shown.length is None else shown.length - start
        self._head(206 if len(body) < whole else 200, length, headers)
        if self.command == "GET":
            length = shown.breaks.pop(0) if shown.breaks else length
            self.wfile.write(body[:length])
            self.close_connection = len(body[:length]) < length

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""
