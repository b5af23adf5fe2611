"""The forks' checkpoints give the forks' logits, losses and gradients (tests/golden/README.md)."""

import json
import random
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron.config import load
from megatron.errors import UserError
from megatron.interop import open_model
from megatron.interop.importing import import_checkpoint, import_if_foreign
from megatron.interop.reference import load_reference

GOLDEN = Path(__file__).parents[1] / "golden" / "model"
CASES = sorted(json.loads((GOLDEN / "cases.json").read_text())["cases"])
every_case = pytest.mark.parametrize("case", CASES)


def load_model(folder, config):
    return load_reference(folder, config)[0]


def write_checkpoint(case: str, folder: Path, **changes: torch.Tensor | None) -> Path:
    """The case's files in the forks' own layout.

    changes: tensors in place of the case's ("layer_02/norm…"), None to leave one out
    """
    weights = {
        key: value
        for key, value in load_file(GOLDEN / f"{case}.safetensors").items()
        if key.startswith("weights/")
    }
    shared = load_file(GOLDEN / "shared.safetensors")
    shared.pop("kept")
    layers = defaultdict(dict)
    for key, tensor in (
        shared | {key.removeprefix("weights/"): value for key, value in weights.items()} | changes
    ).items():
        if tensor is not None:
            layers[key.split("/")[0]][key.split("/")[1]] = tensor
    for layer, tensors in layers.items():
        torch.save(tensors, folder / f"{layer}-model_00-model_states.pt")
    return folder


def golden_config(case: str, *more: str):
    shape = [
        "num_layers=2",
        "hidden_size=72",
        "num_attention_heads=12",
        "seq_length=64",
        "max_position_embeddings=64",
    ]
    return load([], [*shape, f"pos_emb={case}", *more])


def our_name(theirs: str, position: torch.nn.Module) -> str | None:
    """Our parameter for a name in expected.pt."""
    if theirs.startswith("rpe."):
        pairs = {reference: id(tensor) for reference, tensor in position.reference()}
        names = {id(parameter): name for name, parameter in position.named_parameters()}
        return "positions.0." + names[pairs[theirs.removeprefix("rpe.")]]
    plain = {
        "embedding.word_embeddings": "word_embeddings",
        "final_norm": "norm",
        "final_linear.final_linear": "final_linear",
    }
    for prefix, ours in plain.items():
        theirs = theirs.replace(prefix, ours)
    return theirs


@every_case
@pytest.mark.parametrize(("backend", "length"), [("eager", 64), ("sdpa", 256)])
def test_a_reference_checkpoint_gives_the_references_numbers(case, backend, length, tmp_path):
    model = load_model(
        write_checkpoint(case, tmp_path), golden_config(case, f"attention_backend={backend}")
    )
    expected = load_file(GOLDEN / f"{case}.safetensors")
    ids = expected[f"ids_{length}"]
    logits = model(ids[:, :-1])
    positions = slice(None) if length == 64 else load_file(GOLDEN / "shared.safetensors")["kept"]
    torch.testing.assert_close(
        logits[:, positions], expected[f"logits_{length}"], rtol=0, atol=2e-5
    )

    loss = model(ids[:, :-1], labels=ids[:, 1:]).mean()
    torch.testing.assert_close(loss, expected[f"loss_{length}"], rtol=0, atol=2e-5)

    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    compared = set()
    for key, value in expected.items():
        kind, _, theirs = key.partition("/")
        if kind == f"gradnorm_{length}":
            name = our_name(theirs, model.position)
            assert gradients[name].norm().item() == pytest.approx(value.item(), rel=1e-4), name
        elif kind == f"grad_{length}":
            name = our_name(theirs, model.position)
            error = (gradients[name] - value.reshape(gradients[name].shape)).norm() / value.norm()
            assert error < 1e-4, name
        else:
            continue
        compared.add(name)
    assert compared == gradients.keys()


def test_a_checkpoint_of_a_mixture_can_be_read_as_any_mixture_that_is_written_down(
    tmp_path, caplog
):
    """The fork's class stores what all its kernels need, not which of them were mixed."""
    write_checkpoint("mep_param_t5", tmp_path)
    preset = load_model(tmp_path, golden_config("mep_param_t5"))
    with caplog.at_level("INFO"):
        model = load_model(
            tmp_path,
            golden_config("mep", "pos_emb_args={kernels: [t5, {gaussian: {slopes: 0.01}}]}"),
        )
    assert "not used by this encoding: bias_a, bias_p" in caplog.text
    expected = preset.position.kernels[2].weight
    torch.testing.assert_close(model.position.kernels[0].weight, expected, rtol=0, atol=0)


WRONG_SLOPES = {f"layer_0{n}/attention.alibi_embed.slopes": torch.ones(12) for n in (2, 3)}


def test_files_that_disagree_with_the_configuration_are_refused(tmp_path):
    for number, (case, settings, changes, message) in enumerate(
        (
            ("alibi", ["num_layers=3"], {}, 'Missing key(s) in state_dict: "layers.2.'),
            (
                "alibi",
                ["hidden_size=144"],
                {},
                "([160, 72]) from checkpoint, the shape in current model is torch.Size([160, 144])",
            ),
            (
                "alibi",
                ["no_weight_tying=false"],
                {},
                'Unexpected key(s) in state_dict: "final_linear.weight"',
            ),
            ("alibi", ["num_key_value_heads=4"], {}, "num_key_value_heads and gated activations"),
            ("alibi", ["pos_emb=kerple_log"], {}, "bias_p is absent or not what this pos_emb"),
            ("kerple_log", ["pos_emb=alibi"], {}, "['bias_a', 'bias_p'] belong to another"),
            ("alibi", [], WRONG_SLOPES, "slopes is absent or not what this pos_emb"),
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_checkpoint(case, folder, **changes)
        with pytest.raises(UserError) as fault:
            load_model(folder, golden_config(case, *settings))
        assert message in str(fault.value)
        assert str(folder) in str(fault.value)


def test_missing_and_damaged_files_are_named_and_code_is_not_run(tmp_path):
    class Harmful:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    config = golden_config("alibi")
    with pytest.raises(UserError, match=r"in it - give the folder global_stepN itself"):
        load_model(tmp_path, config)
    write_checkpoint("alibi", tmp_path)
    path = tmp_path / "layer_02-model_00-model_states.pt"
    for content in ({"x": Harmful()}, [1], {"norm.weight": 3}):
        torch.save(content, path)
        with pytest.raises(UserError, match=f"{path.name}: is damaged, or holds more than tensors"):
            load_model(tmp_path, config)
    assert not (tmp_path / "ran").exists()


@torch.no_grad()
def test_a_checkpoint_is_opened_and_imported_with_its_configuration(tmp_path):
    folder = tmp_path / "global_step20"
    folder.mkdir()
    write_checkpoint("mep_param", folder)
    config = golden_config("mep_param")
    expected = load_model(folder, config)
    model, opened_as = open_model(folder, config=config)
    assert opened_as == config
    with pytest.raises(UserError, match="has no configuration with it - give the files of its"):
        open_model(folder)
    empty = tmp_path / "other"
    empty.mkdir()
    with pytest.raises(UserError, match=r"global_stepN of GPT-NeoX with its layer_.* or mp_rank"):
        open_model(empty, config=config)
    assert import_if_foreign(folder) == folder
    files = import_checkpoint(folder, tmp_path / "run", config=config)
    assert files.compared == {"reason": "no class of transformers has these weights"}
    assert files.path == tmp_path / "run" / "global_step20"
    assert f"{folder} has no tokenizer that is used here" in files.notes[0]
    ids = torch.arange(60)[None]
    for opened in (model, open_model(tmp_path / "run")[0]):
        assert torch.equal(opened(ids), expected(ids))


@pytest.mark.parametrize("case", ["kerple_log", "t5", "alibi"])
def test_a_checkpoint_without_pipeline_stages_gives_the_references_numbers(case, tmp_path):
    """One file of each rank, as DeepSpeed writes it beside the states of random numbers."""
    divide(write_checkpoint(case, tmp_path))
    for rank in range(RANKS):
        module = {}
        for path in sorted(tmp_path.glob(f"layer_*-model_0{rank}-*")):
            number = int(path.name[6:8])
            for name, tensor in torch.load(path, weights_only=True).items():
                module[f"sequential.{number}.{name}"] = tensor
            path.unlink()
        states = {"np_rng_state": np.random.get_state(), "random_rng_state": random.getstate()}
        content = {"module": module, "optimizer": None, "iteration": 20, **states}
        torch.save(content, tmp_path / f"mp_rank_0{rank}_model_states.pt")
    expected = load_file(GOLDEN / f"{case}.safetensors")
    model, _ = open_model(tmp_path, config=golden_config(case))
    logits = model(expected["ids_64"][:, :-1])
    torch.testing.assert_close(logits, expected["logits_64"], rtol=0, atol=2e-5)
    torch.save({"module": {"layers.0.weight": torch.ones(2)}}, tmp_path / RANK_1)
    with pytest.raises(UserError, match=r"layers\.0\.weight belongs to no layer of GPT-NeoX"):
        open_model(tmp_path, config=golden_config(case))


# --- Tensor-parallel ranks, divided as in GPT-NeoX (megatron/mpu/layers.py there) ---

RANKS = 2
RANK_1 = "mp_rank_01_model_states.pt"
BY_COLUMNS = ("attention.dense.weight", "dense_4h_to_h.weight", "attention.rpe.weight")
BY_ROWS = (
    *("embeddings.weight", "final_linear.weight", "query_key_value.weight", "query_key_value.bias"),
    *("dense_h_to_4h.weight", "dense_h_to_4h.bias", "slopes", "bias_p", "bias_a"),
)


def divide(folder: Path, summed: tuple[str, ...] = (), names: tuple[tuple[str, str], ...] = ()):
    """Give every rank its part of the files of one; names: (ours, theirs) of newer versions.

    summed: biases that each rank adds, a third of them by rank 0
    """
    for path in sorted(folder.glob("*-model_00-*")):
        tensors = torch.load(path, weights_only=True)
        for rank in range(RANKS):
            parts = {}
            for name, tensor in tensors.items():
                part = tensor
                if name.endswith(summed):
                    part = tensor / 3 if rank == 0 else tensor - tensor / 3
                elif name.endswith(BY_COLUMNS):
                    part = tensor.chunk(RANKS, dim=1)[rank].clone()
                elif name.endswith(BY_ROWS):
                    part = tensor.chunk(RANKS)[rank].clone()
                for ours, theirs in names:
                    name = name.replace(ours, theirs)
                parts[name] = part
            torch.save(parts, path.with_name(path.name.replace("model_00", f"model_0{rank}")))


@pytest.mark.parametrize("case", ["kerple_log", "t5", "alibi", "mep_param_t5"])
def test_ranks_give_the_logits_of_the_whole(case, tmp_path):
    folder = write_checkpoint(case, tmp_path)
    divide(folder, names=(("dense_h_to_4h", "linear1"), ("dense_4h_to_h", "linear2")))
    expected = load_file(GOLDEN / f"{case}.safetensors")
    logits = load_model(folder, golden_config(case))(expected["ids_64"][:, :-1])
    torch.testing.assert_close(logits, expected["logits_64"], rtol=0, atol=2e-5)


def test_a_bias_is_summed_over_ranks_only_where_each_rank_adds_it(tmp_path):
    folder = write_checkpoint("alibi", tmp_path)
    parallel = golden_config("alibi", "parallel_residual=true")
    ids = torch.arange(40)[None]
    expected = load_model(folder, parallel)(ids)
    divide(folder, summed=("attention.dense.bias", "dense_4h_to_h.bias"))
    torch.testing.assert_close(load_model(folder, parallel)(ids), expected)
    with pytest.raises(UserError, match=r"do not fit together \(.*attention.dense.bias.*different"):
        load_model(folder, golden_config("alibi"))


def test_a_norm_that_gpt_neox_keeps_and_does_not_use_is_left_out(tmp_path):
    """gpt_j_tied: the logits are those of two norms with the numbers of the first."""
    shared = load_file(GOLDEN / "shared.safetensors")
    equal = {}
    for name, tensor in shared.items():
        if "/input_layernorm" in name:
            equal[name.replace("input_layernorm", "post_attention_layernorm")] = tensor
    ids = torch.arange(40)[None]
    logits = []
    for key, changes in (("parallel_residual", equal), ("gpt_j_tied", {})):
        folder = write_checkpoint("alibi", tmp_path, **changes)
        config = golden_config("alibi", "parallel_residual=true", f"{key}=true")
        logits.append(load_model(folder, config)(ids))
    torch.testing.assert_close(logits[1], logits[0])


def test_layers_whose_copies_differ_keep_their_own(tmp_path, caplog):
    bias_p = torch.linspace(0.1, 1, 12).view(12, 1, 1)
    write_checkpoint("kerple_log", tmp_path, **{"layer_03/attention.rpe.bias_p": bias_p})
    model, config = load_reference(tmp_path, golden_config("kerple_log"))
    assert not config.position.pos_emb_shared
    assert config.hash != golden_config("kerple_log").hash
    assert "copies of bias_p differ" in caplog.text
    assert torch.equal(model.positions[1].p, bias_p.flatten())
    assert not torch.equal(model.positions[0].p, bias_p.flatten())


def test_parts_that_are_missing_or_mixed_are_refused(tmp_path):
    divide(write_checkpoint("alibi", tmp_path))
    path = tmp_path / "layer_02-model_01-model_states.pt"
    tensors = torch.load(path, weights_only=True)
    name = "mlp.dense_4h_to_h.weight"
    lacking = {key: value for key, value in tensors.items() if key != name}
    mixed = tensors | {name: torch.zeros(2, 3)}
    for content in (mixed, lacking, tensors | {"more": torch.zeros(2)}):
        torch.save(content, path)
        with pytest.raises(UserError, match="layer 2: the ranks' tensors do not fit"):
            load_model(tmp_path, golden_config("alibi"))
    path.unlink()
    with pytest.raises(UserError, match="files of some of 2 tensor-parallel ranks are missing"):
        load_model(tmp_path, golden_config("alibi"))
