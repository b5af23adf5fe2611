"""Evaluation keeps documents apart as the training did, and its rows say so."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from megatron.config import load
from megatron.data.tokens import TokenWriter
from megatron.errors import UserError
from megatron.evaluation.run import Options, evaluate
from megatron.model import from_config
from megatron.results.labels import labels_of

TOKENIZER = {"type": "HFTokenizer", "hash": "aaaa", "vocab_size": 60, "eod": 0}
SHAPE = ["num_layers=2", "hidden_size=32", "num_attention_heads=4", "seq_length=16"]
KEYS = ["reset_attention_mask=true", "reset_position_ids=true"]
SIZES = [int(size) for size in np.random.default_rng(3).integers(20, 40, 40)]


def words(folder, *more):
    text = [f"data_path={folder}/text", f"save={folder}/run", "split=5,4,1", "eval_tokens=128"]
    return [*SHAPE, "pos_emb=sinusoidal", "eval_lengths=32,64", *text, *more]


@pytest.fixture
def folder(tmp_path):
    """A corpus of 40 documents, each with its end, and a checkpoint trained with both keys."""
    draw = np.random.default_rng(4)
    with TokenWriter(tmp_path / "text", "uint16", meta={"tokenizer": TOKENIZER}) as writer:
        for size in SIZES:
            writer.add([*draw.integers(1, 60, size - 1), 0])
    config = load([], words(tmp_path, *KEYS))
    checkpoint = tmp_path / "run/global_step3"
    checkpoint.mkdir(parents=True)
    save_file(weights(config), checkpoint / "model.safetensors")
    config.save(checkpoint / "config.yml")
    facts = {"step": 3, "config_hash": config.hash, "vocab": 128, "tokenizer": TOKENIZER}
    (checkpoint / "checkpoint.json").write_text(json.dumps(facts))
    (tmp_path / "run/latest").write_text("global_step3")
    return tmp_path


def weights(config):
    model = from_config(config, vocab=128)
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.state_dict()


def rows(config, folder, name="rows.jsonl", **options):
    found = evaluate(config, Options(output=folder / name, **options))
    return [row for rows in found.rows.values() for row in rows]


def losses_one_by_one(folder, length):
    """The loss of every window, its documents each in a pass of their own: [128]."""
    plain = from_config(load([], words(folder)), vocab=128).double().eval()
    plain.load_state_dict(weights(load([], words(folder))))
    text = np.fromfile(folder / "text.bin", dtype=np.uint16).astype(np.int64)
    start = sum(SIZES[:20])  # documents 20 to 35 are the validation part of split 5,4,1
    losses = []
    for first in range(start, start + 128, length):
        window = torch.from_numpy(text[first : first + length + 1])
        begin = 0
        for index in range(length):
            if window[index] == 0 or index == length - 1:
                logits = plain(window[None, begin : index + 1])[0]
                targets = window[begin + 1 : index + 2]
                losses.append(F.cross_entropy(logits, targets, reduction="none"))
                begin = index + 1
    return torch.cat(losses)


@pytest.mark.parametrize("given", [False, True], ids=["checkpoint alone", "another configuration"])
def test_documents_are_apart_as_in_the_training(folder, given):
    # Keys that a configuration does not name are those of the training.
    config = load([], words(folder)) if given else None
    checkpoint = None if given else str(folder / "run")
    if not given:
        found = rows(None, folder, checkpoint=checkpoint, lengths=[32, 64])
    else:
        found = rows(config, folder)
    for row in found:
        expected = losses_one_by_one(folder, row["length"])
        assert expected.numel() == row["tokens"]
        assert row["loss"] == pytest.approx(expected.mean().item(), abs=1e-5)
        assert row["reset_attention_mask"]
        assert row["reset_position_ids"]


def test_the_command_line_can_ask_for_attention_across_documents(folder):
    apart = rows(load([], words(folder)), folder)
    across = rows(load([], words(folder, "reset_attention_mask=false")), folder, "across.jsonl")
    assert "reset_attention_mask" not in across[0]
    assert "reset_position_ids" not in across[0]
    assert across[0]["text"] == apart[0]["text"]  # the same targets
    assert abs(across[0]["loss"] - apart[0]["loss"]) > 1e-3
    labels = labels_of([apart[0], across[0]])
    assert "reset_attention_mask on" in labels[0]
    assert "reset_attention_mask off" in labels[1]


def test_a_text_whose_documents_do_not_end_is_refused(folder):
    with TokenWriter(folder / "endless", "uint16", meta={"tokenizer": TOKENIZER}) as writer:
        for size in SIZES:
            writer.add(np.random.default_rng(size).integers(1, 60, size))
    config = load([], words(folder, f"data_path={folder}/endless"))
    with pytest.raises(UserError, match=r"reset_attention_mask: the documents of .*endless do not"):
        rows(config, folder)
