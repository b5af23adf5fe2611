"""A model of the hub by its name, from a small hub on this machine."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from tests.interop.theirs import of_theirs

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = "someone/tiny"
SCRIPT = Path(__file__).parents[2] / "tools" / "import_checkpoint.py"


class Hub(BaseHTTPRequestHandler):
    """Answers as huggingface.co does to a list of files and to a file."""

    files: ClassVar[dict[str, bytes]] = {}
    asked: ClassVar[list[str]] = []

    def do_HEAD(self):
        self.answer(with_body=False)

    def do_GET(self):
        self.answer(with_body=True)

    def answer(self, *, with_body):
        place = self.path.partition("?")[0]
        self.asked.append(place)
        if place.startswith(f"/api/models/{NAME}/tree/"):
            body = json.dumps([self.entry(name) for name in self.files]).encode()
        elif place.startswith(f"/api/models/{NAME}"):
            siblings = [{"rfilename": name} for name in self.files]
            body = json.dumps({"id": NAME, "sha": COMMIT, "siblings": siblings}).encode()
        else:
            body = self.files.get(place.removeprefix(f"/{NAME}/resolve/{COMMIT}/"))
        self.send_response(404 if body is None else 200)
        body = body or b""
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def entry(self, name):
        size, sha1 = len(self.files[name]), hashlib.sha1(self.files[name]).hexdigest()
        return {"type": "file", "path": name, "size": size, "oid": sha1}

    def log_message(self, *_):
        """Nothing on stderr."""


@pytest.fixture
def hub():
    Hub.files, Hub.asked = {}, []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def environment(server, tmp_path):
    return {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "no_proxy": "127.0.0.1",
    }


def test_a_name_is_downloaded_once_with_weights_and_without_code(hub, forks, tmp_path):
    of_theirs("pythia").save_pretrained(tmp_path / "theirs")
    Hub.files |= {
        "config.json": (tmp_path / "theirs" / "config.json").read_bytes(),
        "model.safetensors": (tmp_path / "theirs" / "model.safetensors").read_bytes(),
        "consolidated.safetensors": b"a second copy",
        "pytorch_model.bin": b"a third",
        "modeling_tiny.py": b"raise SystemExit('this is code')",
    }
    options = {"cwd": tmp_path, "env": environment(hub, tmp_path)}
    ran = forks.run(SCRIPT, NAME, "-o", "a", **options)
    assert ran.returncode == 0, ran.stderr
    fetched = {path.rpartition("/")[2] for path in Hub.asked if "/resolve/" in path}
    assert fetched == {"config.json", "model.safetensors"}
    assert (tmp_path / "a" / "global_step0" / "model.safetensors").exists()

    hub.shutdown()
    hub.server_close()  # now there is no network
    ran = forks.run(SCRIPT, NAME, "-o", "b", **options)
    assert ran.returncode == 0, ran.stderr
    assert "logits within" in ran.stdout
    ran = forks.run(SCRIPT, "someone/other", "-o", "run", **options)
    assert ran.returncode == 1
    assert "someone/other: is not a folder here, and cannot be downloaded" in ran.stderr
    assert not (tmp_path / "run").exists()
