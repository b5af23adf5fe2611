"""The tool that verifies checkpoints and shows token files."""

from pathlib import Path

import numpy as np

from megatron.checkpoints.manifest import read_record
from megatron.checkpoints.saved import keep_weights_only
from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokens import TokenWriter
from tests.checkpoints import make_checkpoint
from tools.inspect_files import main


def test_whole_checkpoints_are_shown_and_damage_is_named_with_status_1(corpus, tmp_path, capsys):
    run = tmp_path / "run"
    for step in (5, 10):
        make_checkpoint(run, corpus, step=step)
    (run / "latest").write_text("global_step10")
    keep_weights_only(run)
    assert main([str(run)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["step", "size", "config", "for", "state"]
    config_hash = read_record(run / "global_step5")["config_hash"]
    assert lines[1][0] == "5"
    assert lines[1][3:] == [config_hash, "evaluation", "verified"]
    assert lines[2][4:] == ["evaluation", "verified"]
    assert lines[3:] == [["latest:", "step", "10"]]

    weights = run / "global_step5" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    (run / "partial_step12").mkdir()
    assert main([str(run)]) == 1
    shown = capsys.readouterr().out.splitlines()
    for line in (
        f"{weights}: was changed after it was written",
        f"left behind by a process that died: {run}/partial_step12",
    ):
        assert line in shown


BYTES = build_tokenizer("CharLevelTokenizer")
CARD = {"type": "CharLevelTokenizer", "hash": BYTES.hash, "vocab_size": 512, "eod": 0}
TEXTS = ["the cat\n", "", "a much longer text than the others, " * 40]


def test_the_text_and_the_numbers_of_a_token_file_name_what_is_there(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    size = sum(len(text.encode()) for text in TEXTS)
    meta = {"corpus": "cats", "tokenizer": CARD, "text_bytes": size}
    with TokenWriter("c", np.uint16, meta=meta) as writer:
        for text in TEXTS:
            writer.add([*BYTES.encode(text), BYTES.eod])
    assert main(["c", "--split", "2,1,0"]) == 0
    text = capsys.readouterr().out
    for words in (
        f"c (cats)\n3 documents, {len(''.join(TEXTS)) + 3:,} tokens (uint16) of CharLevel",
        "Each document ends with token 0, which the lengths below don't include.",
        "bytes: 1.00 bytes per token.",
        f"Lengths: shortest 0, median 8, mean 483, longest {len(TEXTS[2]):,}",
        "split 2,1,0: train 10 tokens (2 documents), valid 1,441 tokens (1 documents), test 0",
        "--- document 0, 9 tokens, begins with ---\n116 104 101 32 99 97 116 10 0",
    ):
        assert words in text
    Path("c.json").unlink()
    assert main(["c"]) == 0
    assert "c (no card)" in capsys.readouterr().out
