"""The names that users may import, and how each is called: what is listed here stays."""

import importlib
import inspect

import pytest

# `name` or `name = default` of each parameter; those behind * are given by name.
PUBLIC = {
    "megatron.positions.build": "name, shape, **options",
    "megatron.positions.Shape": "heads, head_dim, hidden, train_length",
    "megatron.positions.REGISTRY": "",
    "megatron.positions.register": "name, *, aliases=()",
    "megatron.positions.DistanceBias": "shape",
    "megatron.positions.Position": "shape",
    "megatron.positions.positive": "name, value, *, least=1e-12, most=1000000000000.0",
    "megatron.attention.attention": (
        "q, k, v, bias=None, *, weight=None, window=None, chunk=None, segments=None,"
        " index_bias=None, on_scores=None, score_bias=None, block_scores=None, backend='auto',"
        " self_check=True"
    ),
    "megatron.config.load": "paths, overrides=(), *, trains=True",
    "megatron.interop.open_model": "source, *, config=None",
    "megatron.interop.reference.load_reference": "folder, config",
    "megatron.data.tokens.TokenFile": "prefix, vocab=None",
    "megatron.data.samples.build_split": (
        "tokens, split='949,50,1', part='valid', length=512, seed=1234, num_samples=1"
    ),
    "megatron.results.read_results": "*paths",
}


@pytest.mark.parametrize("path", PUBLIC)
def test_a_public_name_is_there_and_takes_what_it_took(path):
    module, _, name = path.rpartition(".")
    public = getattr(importlib.import_module(module), name)
    if not callable(public):
        assert public, f"{path} is empty"
        return
    parameters = inspect.signature(public).parameters
    promised = inspect.signature(eval(f"lambda {PUBLIC[path]}: None")).parameters
    added = [parameter for key, parameter in parameters.items() if key not in promised]
    plain = [parameter.replace(annotation=parameter.empty) for parameter in parameters.values()]
    assert [parameter for parameter in plain if parameter.name in promised] == [*promised.values()]
    for parameter in added:
        assert parameter.default is not parameter.empty, f"{path} needs {parameter.name} now"
        assert parameter.kind is parameter.KEYWORD_ONLY, f"{path}: {parameter.name} moves others"
