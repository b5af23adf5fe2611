"""Tensor-parallel ranks are joined as GPT-NeoX divides them; parts that do not fit are refused.

GPT-NeoX divides a layer so (megatron/model/transformer.py and mpu/layers.py there): matrices that
widen by rows, matrices that narrow by columns; with grouped queries a rank holds its queries, then
its keys, then its values; before a gated activation it holds its up part, then its gate.
"""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron.config import load
from megatron.errors import UserError
from megatron.interop.reference import load_model, load_reference
from megatron.model import from_config
from tests.interop.test_reference import GOLDEN, golden_config, write_checkpoint

RANKS = 2
HEADS, KEY_HEADS, HEAD_DIM, WIDTH = 8, 4, 6, 32
SHAPE = [
    "num_layers=2",
    "hidden_size=48",
    f"num_attention_heads={HEADS}",
    "seq_length=64",
    "pos_emb=rotary",
]
MODERN = [
    "norm=rmsnorm",
    "activation=swiglu",
    f"intermediate_size={WIDTH}",
    f"num_key_value_heads={KEY_HEADS}",
    "use_bias_in_attn_linear=false",
    "use_bias_in_mlp=false",
]
IDS = torch.arange(40).view(1, 40) * 7 % 96


def random_model(config):
    model = from_config(config, vocab=96)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for parameter in model.parameters():
            parameter.data.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2)
    return model


def rows_of_rank(matrix, rank, ranks):
    """The rank's share of the rows."""
    return matrix.chunk(ranks)[rank].clone()


def columns_of_rank(matrix, rank, ranks):
    return matrix.chunk(ranks, dim=1)[rank].clone()


def grouped_of_rank(matrix, rank, ranks):
    """From ours, [key heads, (q, q, k, v), head_dim], to a rank's queries, keys, values."""
    by_group = matrix.view(KEY_HEADS, HEADS // KEY_HEADS + 2, HEAD_DIM, -1).chunk(ranks)[rank]
    parts = [by_group[:, :-2], by_group[:, -2], by_group[:, -1]]
    return torch.cat([part.reshape(-1, matrix.shape[1]) for part in parts])


def gated_of_rank(matrix, rank, ranks):
    gate, up = matrix.chunk(2)
    return torch.cat([rows_of_rank(up, rank, ranks), rows_of_rank(gate, rank, ranks)])


def whole(tensor, rank, ranks):
    return tensor.clone()


def summed(tensor, rank, ranks):
    """Each rank adds its own, and their sum is the bias: rank 0 has a third of it here."""
    return tensor / 3 if rank == 0 else tensor - tensor / 3


def layers_of(model, rules, rank, ranks, names):
    """Number in GPT-NeoX's pipeline -> tensors of a rank."""
    places = {"word_embeddings": 0, "norm": 5, "final_linear": 6}
    layers = {}
    for name, tensor in model.state_dict().items():
        head, _, rest = name.partition(".")
        number = places.get(head)
        if number is None:
            index, _, name = rest.partition(".")
            number = int(index) + 2
        rule = next((rule for end, rule in rules.items() if name.endswith(end)), whole)
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        layers.setdefault(number, {})[name] = rule(tensor, rank, ranks)
    return layers


PLAIN_RULES = {
    "word_embeddings.weight": rows_of_rank,
    "final_linear.weight": rows_of_rank,
    "query_key_value.weight": rows_of_rank,
    "query_key_value.bias": rows_of_rank,
    "attention.dense.weight": columns_of_rank,
    "dense_h_to_4h.weight": rows_of_rank,
    "dense_h_to_4h.bias": rows_of_rank,
    "dense_4h_to_h.weight": columns_of_rank,
}
MODERN_RULES = PLAIN_RULES | {
    "query_key_value.weight": grouped_of_rank,
    "dense_h_to_4h.weight": gated_of_rank,
}
NEW_NAMES = {
    "dense_h_to_4h": "linear1",
    "dense_4h_to_h": "linear2",
    "layernorm.weight": "layernorm.scale",
    "norm.weight": "norm.scale",
}


def write_layers(folder, model, rules, ranks, names=()):
    for rank in range(ranks):
        for number, tensors in layers_of(model, rules, rank, ranks, dict(names)).items():
            path = folder / f"layer_{number:02}-model_{rank:02}-model_states.pt"
            torch.save(tensors, path)


def write_ranks(folder, model, rules, ranks, names=()):
    """As a model without a pipeline is saved, with the generators' states beside the weights."""
    for rank in range(ranks):
        layers = layers_of(model, rules, rank, ranks, dict(names))
        module = {
            f"sequential.{number}.{name}": tensor
            for number, tensors in layers.items()
            for name, tensor in tensors.items()
        }
        state = {"module": module, "np_rng_state": np.random.get_state(), "iteration": 3}
        torch.save(state, folder / f"mp_rank_{rank:02}_model_states.pt")


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("write", [write_layers, write_ranks])
def test_grouped_queries_and_gates_come_back_in_our_order(write, ranks, tmp_path):
    config = load([], [*SHAPE, *MODERN])
    model = random_model(config)
    write(tmp_path, model, MODERN_RULES, ranks, NEW_NAMES.items())
    found = load_model(tmp_path, config).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(found[name], tensor), name


def test_matrices_of_their_own_for_gate_and_up_are_read_too(tmp_path):
    config = load([], [*SHAPE, *MODERN])
    model = random_model(config)
    write_layers(tmp_path, model, MODERN_RULES, RANKS, NEW_NAMES.items())
    for path in tmp_path.iterdir():
        tensors = torch.load(path, weights_only=True)
        if "mlp.linear1.weight" in tensors:
            up, gate = tensors.pop("mlp.linear1.weight").chunk(2)
            tensors |= {"mlp.w3.weight": up.clone(), "mlp.w1.weight": gate.clone()}
            tensors["mlp.w2.weight"] = tensors.pop("mlp.linear2.weight")
            torch.save(tensors, path)
    assert torch.equal(load_model(tmp_path, config)(IDS), model.eval()(IDS))


def test_a_bias_is_summed_over_ranks_only_where_each_rank_adds_it(tmp_path):
    parallel = load([], [*SHAPE, "parallel_residual=true"])
    model = random_model(parallel)
    rules = PLAIN_RULES | {"attention.dense.bias": summed, "dense_4h_to_h.bias": summed}
    write_layers(tmp_path, model, rules, RANKS)
    torch.testing.assert_close(load_model(tmp_path, parallel)(IDS), model.eval()(IDS))
    with pytest.raises(UserError, match=r"copies of attention.dense.bias differ by .* different"):
        load_model(tmp_path, load([], SHAPE))

    write_layers(tmp_path, model, PLAIN_RULES, RANKS)
    one_after_the_other = load_model(tmp_path, load([], SHAPE)).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(one_after_the_other[name], tensor), name


@pytest.mark.parametrize("case", ["kerple_log", "t5", "alibi", "mep_param_t5"])
def test_an_encoding_divided_over_ranks_gives_the_references_logits(case, tmp_path):
    folder = write_checkpoint(case, tmp_path)
    for path in sorted(folder.glob("*-model_00-*")):
        tensors = torch.load(path, weights_only=True)
        for rank in range(RANKS):
            parts = {}
            for name, tensor in tensors.items():
                rule = next((r for end, r in PLAIN_RULES.items() if name.endswith(end)), whole)
                if name.startswith(("attention.rpe", "attention.alibi")):
                    # T5's table is [buckets, heads]; all others begin with the heads
                    rule = columns_of_rank if name.endswith(".weight") else rows_of_rank
                parts[name] = rule(tensor, rank, RANKS)
            torch.save(parts, path.with_name(path.name.replace("model_00", f"model_0{rank}")))
    expected = load_file(GOLDEN / f"{case}.safetensors")
    logits = load_model(folder, golden_config(case))(expected["ids_64"][:, :-1])
    torch.testing.assert_close(logits, expected["logits_64"], rtol=0, atol=2e-5)


def test_layers_whose_copies_differ_keep_their_own(tmp_path, caplog):
    own = torch.linspace(0.1, 1, 12).view(12, 1, 1)
    write_checkpoint("kerple_log", tmp_path, **{"layer_03/attention.rpe.bias_p": own})
    model, config = load_reference(tmp_path, golden_config("kerple_log"))
    assert not config.position.pos_emb_shared
    assert config.hash != golden_config("kerple_log").hash
    assert "copies of bias_p differ" in caplog.text
    assert torch.equal(model.positions[1].p, own.flatten())
    assert not torch.equal(model.positions[0].p, own.flatten())


def test_parts_that_are_missing_or_mixed_and_other_files_are_refused(tmp_path):
    config = load([], [*SHAPE, *MODERN])
    write_layers(tmp_path, random_model(config), MODERN_RULES, RANKS, NEW_NAMES.items())
    path = tmp_path / "layer_02-model_01-model_states.pt"
    tensors = torch.load(path, weights_only=True)
    name = "mlp.linear2.weight"
    lacking = {key: value for key, value in tensors.items() if key != name}
    for content, message in (
        (tensors | {name: torch.zeros(2, 3)}, r"have the shapes \[\[48, 16\], \[2, 3\]\]"),
        (lacking, "layer 2: not every rank has the same tensors"),
        (tensors | {name: 3}, "mlp.linear2.weight is not a weight"),
        (tensors | {name: tensors[name].to(torch.int8)}, "mlp.linear2.weight is not a weight"),
    ):
        torch.save(content, path)
        with pytest.raises(UserError, match=message) as fault:
            load_model(tmp_path, config)
        assert str(tmp_path) in str(fault.value)
    path.unlink()
    with pytest.raises(UserError, match="layer 2 lacks the part of tensor-parallel rank 1 of 2"):
        load_model(tmp_path, config)
    for file in tmp_path.iterdir():
        file.unlink()
    for content, message in (
        ({"optimizer": {}}, "holds no model of GPT-NeoX"),
        ({"module": {"layers.0.weight": torch.ones(2)}}, "layers.0.weight is not a weight of a"),
    ):
        torch.save(content, tmp_path / "mp_rank_00_model_states.pt")
        with pytest.raises(UserError, match=message):
            load_model(tmp_path, config)
