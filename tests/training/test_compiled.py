"""torch.compile of the layers: the same training, and one message where nothing can be compiled."""

import shutil

import pytest
import torch

from megatron.attention import BACKENDS
from megatron.attention.eager import eager
from megatron.config import load
from megatron.errors import UserError
from megatron.model import from_config
from megatron.training.compiled import check_attention, compile_layers
from tests.support import ROOT, run
from tests.training.conftest import tiny


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_compiled_layers_give_the_losses_gradients_and_names_of_plain_ones():
    config = load([], tiny("pos_emb=mep_param", "num_layers=1"))
    plain, compiled = from_config(config, 61), from_config(config, 61)
    compile_layers(compiled, torch.device("cpu"))
    assert list(compiled.state_dict()) == list(plain.state_dict())
    ids = torch.randint(61, (2, 65))
    losses = [model(ids[:, :-1], labels=ids[:, 1:], mean=True) for model in (plain, compiled)]
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-6)
    for loss in losses:
        loss.backward()
    for (name, ours), theirs in zip(compiled.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_a_broken_backend_is_found_although_compiled_code_checks_nothing(monkeypatch):
    def a_key_too_far(q, k, v, bias, **more):
        return eager(q, k, v, bias.roll(1, dims=1), **more)

    monkeypatch.setitem(BACKENDS, "planted", a_key_too_far)
    model = from_config(load([], tiny("pos_emb=alibi")), 61)
    model.backend = "planted"
    for layer in model.layers:
        layer.compile(backend="eager")
    with pytest.raises(UserError, match="planted is wrong"):
        check_attention(model, torch.device("cpu"))


SCRIPT = """
import torch
from megatron.config import load
from megatron.model import from_config
from megatron.training.compiled import compile_layers
from tests.training.conftest import tiny
compile_layers(from_config(load([], tiny()), 61), torch.device("cpu"))
"""


def test_a_machine_without_a_compiler_is_told_so_before_training(tmp_path):
    nowhere = {
        "PATH": str(tmp_path),
        "CXX": "no-such-compiler",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
    }
    found = run("-c", SCRIPT, env=nowhere | {"PYTHONPATH": str(ROOT)})
    last = found.stderr.strip().splitlines()[-1]
    assert f"{UserError.__name__}: torch_compile: this machine cannot compile (" in last
    assert last.endswith(
        " - install a C++ compiler (g++) and Python's headers, or set torch_compile: false"
    )
