"""What the files of a run of Weights & Biases hold, and servers that make trouble."""

import json
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

BLOCK = 32768
FULL, LAST = 1, 4  # kinds of a piece that ends a record
REFUSAL = b'{"errors": [{"message": "user is not logged in"}]}'
PORTAL = b"<html>Welcome to our guest network</html>"


@dataclass
class Kept:
    """id of the run; history: numbers of each record; artifacts: their files by type"""

    id: str = ""
    history: list[dict[str, Any]] = field(default_factory=list)
    artifacts: dict[str, list[str]] = field(default_factory=dict)


def chunks(path: Path) -> Iterator[bytes]:
    """Records of a .wandb file, which has LevelDB's log format behind seven bytes."""
    content = path.read_bytes()
    place, record = 7, b""
    while place + 7 <= len(content):
        left = BLOCK - place % BLOCK
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (FULL, LAST):
            yield record
            record = b""


def kept_in(folder: Path) -> list[Kept]:
    """What the runs below SAVE/wandb hold, the oldest first."""
    from wandb.proto import wandb_internal_pb2

    found = []
    for path in sorted(folder.glob("wandb/*run-*/*.wandb"), key=_started):
        kept = Kept()
        for chunk in chunks(path):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(chunk)
            _add(record, kept)
        found.append(kept)
    return found


def _started(path: Path) -> tuple[str, bool]:
    """When a run began; one that is kept offline begins where the same one failed online."""
    kind, _, moment = path.parent.name.partition("run-")
    return moment, kind == "offline-"


def _add(record: Any, kept: Kept) -> None:
    kind = record.WhichOneof("record_type")
    if kind == "run":
        kept.id = record.run.run_id
    elif kind == "history":
        items = record.history.item
        values = {item.key or "/".join(item.nested_key): item.value_json for item in items}
        kept.history.append({key: json.loads(text) for key, text in values.items()})
    elif kind in ("artifact", "request"):
        artifact = record.artifact if kind == "artifact" else record.request.log_artifact.artifact
        if artifact.type:
            files = [entry.path for entry in artifact.manifest.contents]
            kept.artifacts[artifact.type] = sorted(files)


@contextmanager
def server(status: int | None) -> Iterator[tuple[str, threading.Event]]:
    """Address of a server that answers every request with a status, or with nothing while it lasts.

    The event says that it was asked for a run.
    """
    asked, ended = threading.Event(), threading.Event()

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            asked.set()
            if status is None:
                ended.wait(60)
                return
            self.send_response(status)
            self.end_headers()
            self.wfile.write(REFUSAL if status != 200 else PORTAL)

        do_GET = do_POST

        def log_message(self, *_: object) -> None:
            """Nothing is printed."""

    running = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    running.daemon_threads = True
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{running.server_address[1]}", asked
    finally:
        ended.set()
        running.shutdown()
        running.server_close()
        thread.join(10)
