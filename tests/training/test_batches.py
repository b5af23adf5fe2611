"""The text of a run: blends, epochs, short windows, documents apart, what is refused at once."""

import json
import logging
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import MistralConfig, MistralForCausalLM

from megatron.checkpoints.read import load_for_evaluation
from megatron.checkpoints.write import write_checkpoint
from megatron.config import load
from megatron.data.parts import open_parts
from megatron.data.tokens import TokenWriter
from megatron.errors import UserError
from megatron.interop import open_model
from megatron.model import GPT, from_config
from megatron.parallel.grid import Grid
from megatron.training.batches import Batches, open_text
from megatron.training.loop import train
from megatron.training.trainer import Trainer
from tests.training.conftest import MODEL, VOCAB, check_same, interrupted, records, tiny

TOKENIZER = {"type": "CharLevelTokenizer", "hash": "aaaa", "vocab_size": 257, "eod": 256}
OWN = [word for word in tiny() if not word.startswith("tokenizer_type")]
"""The small model, with the tokenizer of its data."""


def write(folder, name, size, tokenizer=TOKENIZER):
    """A corpus of 30 documents of bytes."""
    generator = np.random.default_rng(size)
    meta = {"corpus": name, "tokenizer": tokenizer}
    with TokenWriter(folder / f"{name}_text_document", np.uint16, meta=meta) as writer:
        for _ in range(30):
            writer.add([*generator.integers(97, 123, size), 256])
    return str(writer.prefix)


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """Two corpora to train on and two to validate on."""
    folder = tmp_path_factory.mktemp("blend")
    sizes = {"poems": 300, "prose": 500, "new_poems": 90, "new_prose": 110}
    return {name: write(folder, name, size) for name, size in sizes.items()}


def blended(texts, folder, *more):
    words = [
        f"train_data_paths=[{texts['poems']},{texts['prose']}]",
        "train_data_weights=[1, 3]",
        f"valid_data_paths=[{texts['new_poems']},{texts['new_prose']}]",
        *("train_iters=8", "save_interval=4", "eval_interval=4", "eval_iters=2"),
    ]
    return load([], [*OWN, *words, f"save={folder}", f"load={folder}", *MODEL, *more])


def test_a_blend_is_named_and_resumed_to_the_last_bit(grid, texts, tmp_path, caplog):
    straight = tmp_path / "straight"
    train(blended(texts, straight), grid)
    record = json.loads((straight / "global_step4/checkpoint.json").read_text())
    assert record["corpus"] == "poems 0.25, prose 0.75"
    folder = interrupted(straight, 4, tmp_path / "run")
    train(blended(texts, folder, "num_workers=2"), grid)
    check_same(straight, folder)
    check_same(straight, folder, "valid")
    with caplog.at_level(logging.INFO):
        train(blended(texts, folder, "train_iters=9", "train_data_weights=[1,1]"), grid)
    assert "train_data_weights: [1.0, 3.0] there, [1.0, 1.0] here" in caplog.text
    other = f"train_data_paths=[{texts['prose']},{texts['poems']}]"
    with pytest.raises(UserError, match=r"was trained on other text \(tokens: "):
        train(blended(texts, folder, "train_iters=10", other), grid)


def test_ranks_divide_the_windows_of_a_blend(texts, tmp_path):
    """A resume with other ranks reads on: two ranks have what one has."""
    config = blended(texts, tmp_path / "run", "train_micro_batch_size_per_gpu=2")
    parts = open_parts(config.data)
    whole = Batches(blended(texts, tmp_path / "run"), Grid(), parts)
    steps = [whole.next_step(64)[0] for _ in range(3)]
    ranks = [Batches(config, Grid(rank, 2), parts, used=4) for rank in (0, 1)]
    resumed = [rank.next_step(64)[0] for rank in ranks]
    np.testing.assert_array_equal(np.concatenate(resumed), steps[1])


def test_text_that_does_not_fit_is_refused_with_its_key(grid, texts, tmp_path):
    """tests/bad_inputs has more."""
    other = write(tmp_path, "odd", 80, TOKENIZER | {"hash": "bbbb"})
    bare = write(tmp_path, "bare", 80, {"type": "HFTokenizer", "hash": "b", "vocab_size": 257})
    plain = write(tmp_path, "plain", 80, {})
    alone, tokenizer = ["train_iters=1", "split=1,0,0"], "tokenizer_type=CharLevelTokenizer"
    cases = [
        (
            [f"train_data_paths=[{texts['poems']},{other}]", "train_iters=1"],
            "odd_text_document: was not written by the same tokenizer",
        ),
        (
            [*alone, f"data_path={bare}", "eod_mask_loss=true"],
            "eod_mask_loss: we don't know which token ends a document",
        ),
        (
            [*alone, f"data_path={plain}", "reset_attention_mask=true", tokenizer],
            r"reset_attention_mask: the documents of .* do not end with token 0",
        ),
    ]
    for words, message in cases:
        with pytest.raises(UserError, match=message):
            train(load([], [*OWN, *words, f"save={tmp_path / 'run'}"]), grid)
    assert not list(tmp_path.glob("run/global*"))
    # Another name of the same kind is no other tokenizer.
    named = TOKENIZER | {"type": "HFTokenizer"}
    path = write(tmp_path, "named", 80, named)
    words = [f"data_path={path}", "tokenizer_type=HFGPT2Tokenizer"]
    assert open_text(load([], [*OWN, *words]))[1]["tokenizer"] == named


# --- short windows first --------------------------------------------------------------------------

STAGES = ["seq_length_schedule=[[16, 1], [32, 2]]", "train_iters=3", "eval_iters=1"]


YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
GROWING = (  # a stage, and the model of transformers that it means
    ({"until": 1, "seq_length": 16, "window": 8}, {"rope_theta": 10000.0}, 8),
    ({"until": 2, "seq_length": 32, "pos_emb_args": {"base": 500}}, {"rope_theta": 500.0}, None),
    (
        {"pos_emb_args": {"scaling": "yarn", "factor": 4, "original_length": 16}},
        {"rope_type": "yarn", "rope_theta": 10000.0, **YARN},
        None,
    ),
)


def test_each_stage_trains_and_is_measured_as_transformers_model_of_its_settings(grid, tmp_path):
    """Windows are sliding ones of Mistral, frequencies those of its rope_parameters."""
    corpus, weights = write(tmp_path, "short", 20), None
    theirs = []
    for _, rope, window in GROWING:
        shape = MistralConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            intermediate_size=48,
            vocab_size=257,
            initializer_range=0.2,
            sliding_window=window,
            max_position_embeddings=64,
            rope_parameters={"rope_type": "default", **rope},
            attn_implementation="eager",
        )
        model = MistralForCausalLM(shape).eval()
        weights = weights or model.state_dict()
        model.load_state_dict(weights)
        theirs.append(model)
    theirs[1].save_pretrained(tmp_path / "mistral")
    ours, config = open_model(tmp_path / "mistral")
    facts = {"vocab": 257, "tokenizer": TOKENIZER}
    parent = write_checkpoint(tmp_path / "parent", 0, ours.state_dict(), config, facts)

    stages = [stage for stage, _, _ in GROWING]
    words = [f"seq_length_schedule={json.dumps(stages)}", "seq_length=64", "pos_emb_args={}"]
    words += [f"data_path={corpus}", "split=1,0,0", "train_iters=3", "eval_interval=0"]
    words += [f"load={parent}", f"save={tmp_path / 'run'}", "finetune=true", "save_interval=1"]
    words += ["optimizer.params.lr=0", "log_interval=1"]
    config = load([parent / "config.yml"], words)
    train(config, grid)
    batches = Batches(config, Grid(), open_parts(config.data, ["train"]))
    logged = records(tmp_path / "run")
    for step, (stage, model) in enumerate(zip(stages, theirs, strict=True), 1):
        [batch] = batches.next_step(stage.get("seq_length", 64))
        with torch.no_grad():
            logits = model(batch[:, :-1]).logits
        expected = F.cross_entropy(logits.transpose(1, 2), batch[:, 1:]).item()
        assert logged[step]["loss"] == pytest.approx(expected, rel=2e-6)
        saved, _, _ = load_for_evaluation(tmp_path / "run", step)
        with torch.no_grad():
            loss = saved(batch[:, :-1], batch[:, 1:], mean=True).item()
        assert loss == pytest.approx(expected, rel=2e-6)
        other = theirs[step % 3](batch[:, :-1]).logits
        other_loss = F.cross_entropy(other.transpose(1, 2), batch[:, 1:]).item()
        assert abs(other_loss - expected) > 1e-3


def test_the_log_says_the_length_of_a_step_and_validations_keep_theirs(
    grid, texts, tmp_path, caplog
):
    config = blended(texts, tmp_path, *STAGES)
    with caplog.at_level(logging.INFO):
        train(config, grid)
    logged = list(records(tmp_path).values())
    assert [record["seq_length"] for record in logged] == [16, 32, 64]
    assert [record["tokens"] for record in logged] == [256, 512, 768]
    assert re.search(r"step 2/3 .* length 32 ", caplog.text)
    [valid] = records(tmp_path, "valid").values()
    assert valid["length"] == 64


# --- documents apart ------------------------------------------------------------------------------

END = 0


def ending(grid, *words: str) -> Trainer:
    """The small model, which knows the token that ends a document."""
    config = load([], tiny("train_iters=10", *words))
    return Trainer(config, from_config(config, VOCAB, END), grid)


def text(*ends: int) -> Tensor:
    """Four windows, the first with so many ends of documents, and so on: [4, 65] int64."""
    draw = torch.Generator().manual_seed(len(ends))
    ids = torch.randint(1, VOCAB, (4, 65), generator=draw)
    for row, count in enumerate(ends):
        ids[row, torch.randperm(65, generator=draw)[:count]] = END
    return ids


def neox_loss(gpt: GPT, batch: Tensor) -> Tensor:
    """GPT-NeoX: loss_mask is 0 where the input ends a document, then sum(losses * mask) / sum."""
    tokens, labels = batch[:, :-1], batch[:, 1:]
    mask = torch.ones(tokens.shape)
    mask[tokens == END] = 0.0
    losses = F.cross_entropy(gpt(tokens).transpose(1, 2), labels, reduction="none")
    return (losses * mask).sum() / mask.sum()


def test_a_step_has_the_loss_and_gradient_of_gpt_neox(grid):
    words = ["eod_mask_loss=true", "gradient_accumulation_steps=2", "gradient_clipping=0"]
    run = ending(grid, *words)
    plain = from_config(load([], tiny("train_iters=10")), VOCAB)
    plain.load_state_dict(run.model.state_dict())
    few, many = text(1), text(30, 20, 40)
    # Each micro batch has a mean of its own, and both weigh the same.
    expected = (neox_loss(plain, few) + neox_loss(plain, many)) / 2
    assert run.validate(iter([few, many]), 2) == pytest.approx(expected.item(), rel=1e-6)
    expected.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    result = run.train_step([few, many])
    assert result.loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert float(result.grad_norm) == pytest.approx(float(norm), rel=1e-5)
    unmasked = ending(grid, *words[1:]).train_step([few, many])
    assert abs(unmasked.loss.item() - expected.item()) > 1e-4
