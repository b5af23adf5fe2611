"""A hub on this machine, whose connections break."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Server(ThreadingHTTPServer):
    """Shows files by their path.

    breaks: of a path, bytes after which each of the next connections is closed
    asked: (path, Range) of every request
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.files: dict[str, bytes] = {}
        self.breaks: dict[str, list[int]] = {}
        self.asked: list[tuple[str, str | None]] = []

    def show_dataset(self, name: str, files: Mapping[str, bytes]) -> None:
        """Be a hub with one data set, as huggingface_hub asks for it."""
        self._show(f"/api/datasets/{name}", f"/datasets/{name}", files, "main")

    def show_model(self, name: str, files: Mapping[str, bytes], revision: str) -> None:
        """Be a hub with one model at a revision."""
        self._show(f"/api/models/{name}", f"/{name}", files, revision)

    def _show(self, api: str, address: str, files: Mapping[str, bytes], revision: str) -> None:
        name = address.strip("/")
        siblings = [{"rfilename": path} for path in files]
        about = {
            "id": name.removeprefix("datasets/"),
            "sha": COMMIT,
            "siblings": siblings,
            "tags": [],
        }
        for place in ("", f"/revision/{revision}", f"/revision/{COMMIT}"):
            self.files[f"{api}{place}"] = json.dumps(about).encode()

        folders = {path.rpartition("/")[0] for path in files} | {""}
        entries: list[dict[str, Any]] = [
            {"type": "directory", "path": folder, "oid": "0" * 40} for folder in folders - {""}
        ]
        for path, content in files.items():
            entries.append({"type": "file", "path": path, "size": len(content), "oid": "0" * 40})
            for place in (COMMIT, revision):
                self.files[f"{address}/resolve/{place}/{path}"] = content
        for folder in folders:
            inside = [entry for entry in entries if f"{entry['path']}".startswith(folder)]
            inside = [entry for entry in inside if entry["path"] != folder]
            place = f"{api}/tree/{COMMIT}/{folder}".rstrip("/")
            self.files[place] = json.dumps(inside).encode()

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
        content = self.server.files.get(path)
        if content is None:
            missing = "RevisionNotFound" if "/revision/" in path else "EntryNotFound"
            self._head(404, 0, {"X-Error-Code": missing})
            return
        start, end, whole = 0, len(content), len(content)
        if byte_range:
            first, last = byte_range.removeprefix("bytes=").split("-")
            start, end = int(first), min(whole, int(last or whole) + 1)
        body = content[start:end]
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
        if len(body) < whole:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{whole}"
        self._head(206 if len(body) < whole else 200, len(body), headers)
        if self.command == "GET":
            breaks = self.server.breaks.get(path)
            sent = body[: breaks.pop(0)] if breaks else body
            self.wfile.write(sent)
            self.close_connection = len(sent) < len(body)

    def _head(self, status: int, length: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""
