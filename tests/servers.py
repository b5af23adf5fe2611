"""Servers on this machine that behave as badly as those of the network do."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Shown:
    """A file that a server shows, and how it fails.

    breaks: bytes after which each of the next connections is closed
    ranges: whether it continues a file
    length: the size that it says, if not the right one; status: what it answers instead, each once
    """

    content: bytes = b""
    breaks: list[int] = field(default_factory=list)
    ranges: bool = True
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
        siblings = [{"rfilename": path} for path in files]
        about = {"id": name, "sha": COMMIT, "siblings": siblings, "tags": []}
        entries = []
        for path, content in files.items():
            sha256 = hashlib.sha256(content).hexdigest()
            lfs = {"oid": sha256, "size": len(content), "pointerSize": 130}
            entries.append(
                {"type": "file", "path": path, "size": len(content), "oid": "0" * 40, "lfs": lfs}
            )
            self.files[f"/datasets/{name}/resolve/{COMMIT}/{path}"] = Shown(content)
            self.files[f"/datasets/{name}/resolve/main/{path}"] = Shown(content)
        folders = {path.rpartition("/")[0] for path in files} | {""}
        directories = [
            {"type": "directory", "path": folder, "oid": "0" * 40} for folder in folders - {""}
        ]
        for place in ("", "/revision/main", f"/revision/{COMMIT}"):
            self.files[f"/api/datasets/{name}{place}"] = Shown(json.dumps(about).encode())
        for folder in folders:
            inside = [
                entry
                for entry in [*directories, *entries]
                if entry["path"].startswith(folder) and entry["path"] != folder
            ]
            shown = Shown(json.dumps(inside).encode())
            self.files[f"/api/datasets/{name}/tree/{COMMIT}/{folder}".rstrip("/")] = shown

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
        wanted = self.headers.get("Range")
        path = self.path.partition("?")[0]
        self.server.asked.append((path, wanted))
        shown = self.server.files.get(path)
        if shown is None or shown.status:
            self.send_response(404 if shown is None else shown.status.pop(0))
            self.send_header("X-Error-Code", self._missing(path))
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if shown.location is not None:
            self.send_response(302)
            self.send_header("Location", shown.location)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self._send(shown, wanted)

    def _missing(self, path: str) -> str:
        """What the hub says of a path that it does not have."""
        name = "/".join(path.removeprefix("/api").split("/")[:4])
        if f"/api{name}" not in self.server.files:
            return "RepoNotFound"
        return "RevisionNotFound" if "/revision/" in path else "EntryNotFound"

    def _send(self, shown: Shown, wanted: str | None) -> None:
        tag = f'"{hashlib.sha256(shown.content).hexdigest()}"'
        start = 0
        end = len(shown.content)
        if wanted and shown.ranges and self.headers.get("If-Range", tag) == tag:
            first, last = wanted.removeprefix("bytes=").split("-")
            start = int(first)
            end = min(end, int(last) + 1) if last else end
        body = shown.content[start:end]
        if start and not body:
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(shown.content)}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        partly = start > 0 or end < len(shown.content)
        self.send_response(206 if partly else 200)
        if partly:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(shown.content)}")
        self.send_header("X-Repo-Commit", COMMIT)
        length = len(body) if shown.length is None else shown.length - start
        self.send_header("Content-Length", str(length))
        self.send_header("ETag", tag)
        self.end_headers()
        if self.command == "HEAD":
            return
        if shown.breaks:
            body = body[: shown.breaks.pop(0)]
        self.wfile.write(body)
        if len(body) < length:
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""
