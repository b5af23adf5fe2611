"""A model of the hub by its name, from a small hub on this machine."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import save_file

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = "someone/tiny"
SCRIPT = Path(__file__).parents[2] / "tools" / "import_checkpoint.py"
SETTINGS = {
    "architectures": ["GPTNeoXForCausalLM"],
    "model_type": "gpt_neox",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
LAYER = {
    "input_layernorm": (32,),
    "post_attention_layernorm": (32,),
    "attention.query_key_value": (96, 32),
    "attention.dense": (32, 32),
    "mlp.dense_h_to_4h": (64, 32),
    "mlp.dense_4h_to_h": (32, 64),
}


def weights():
    """Random weights under the names that the class GPTNeoXForCausalLM has in its files."""
    draw = torch.Generator().manual_seed(0)
    shapes = {"gpt_neox.embed_in.weight": (64, 32), "embed_out.weight": (64, 32)}
    modules = {f"gpt_neox.layers.0.{name}": shape for name, shape in LAYER.items()}
    for module, shape in (modules | {"gpt_neox.final_layer_norm": (32,)}).items():
        shapes |= {f"{module}.weight": shape, f"{module}.bias": shape[:1]}
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


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
    Hub.files, Hub.asked = {"config.json": json.dumps(SETTINGS).encode()}, []
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
    save_file(weights(), tmp_path / "model.safetensors", {"format": "pt"})
    Hub.files |= {
        "model.safetensors": (tmp_path / "model.safetensors").read_bytes(),
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


def test_a_model_without_safetensors_gives_its_plain_weights(hub, forks, tmp_path):
    torch.save(weights(), tmp_path / "pytorch_model.bin")
    Hub.files["pytorch_model.bin"] = (tmp_path / "pytorch_model.bin").read_bytes()
    options = {"cwd": tmp_path, "env": environment(hub, tmp_path)}
    ran = forks.run(SCRIPT, NAME, "-o", "run", **options)
    assert ran.returncode == 0, ran.stderr
    assert "logits within" in ran.stdout


def test_a_model_that_the_hub_does_not_have_is_one_message(hub, forks, tmp_path):
    options = {"cwd": tmp_path, "env": environment(hub, tmp_path)}
    ran = forks.run(SCRIPT, "someone/other", "-o", "run", **options)
    assert ran.returncode == 1
    assert ran.stderr.count("\n") == 1
    assert "someone/other: cannot be downloaded" in ran.stderr
    assert not (tmp_path / "run").exists()
