"""The text of a run: blends, epochs, documents apart, and what is refused before the first step."""

import json
import logging
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.checkpoints.read import load_for_evaluation, read_meta
from megatron.checkpoints.saved import find
from megatron.config import load
from megatron.data.parts import open_parts
from megatron.data.tokens import TokenFile, TokenWriter
from megatron.errors import UserError
from megatron.evaluation.evaluate_checkpoint import evaluate
from megatron.evaluation.options import Options
from megatron.model import GPT, from_config
from megatron.parallel.grid import Grid
from megatron.results.table import table
from megatron.sweeps.cells import absent_data, corpus_size, load_sweep
from megatron.training.batches import Batches, open_text
from megatron.training.loop import train, train_step
from megatron.training.trainer import Trainer
from tests.training.conftest import MODEL, records, tiny

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


@pytest.fixture(scope="module")
def run_of_blend(grid, texts, tmp_path_factory):
    """The folder of an uninterrupted run of eight steps; not to be changed."""
    folder = tmp_path_factory.mktemp("blended")
    train(blended(texts, folder), grid)
    return folder


def without_step_8(run, folder):
    """A copy of a run that was killed before that step."""
    shutil.copytree(run, folder)
    shutil.rmtree(folder / "global_step8")
    (folder / "latest").write_text("global_step4")
    return folder


def test_a_resumed_blend_repeats_the_uninterrupted_run_to_the_last_bit(
    grid, texts, run_of_blend, tmp_path
):
    folder = without_step_8(run_of_blend, tmp_path / "run")
    train(blended(texts, folder, "num_workers=2"), grid)
    for kind in ("train", "valid"):
        straight, resumed = records(run_of_blend, kind), records(folder, kind)
        assert straight.keys() == resumed.keys()
        for step in straight:
            assert straight[step]["loss"] == resumed[step]["loss"], (kind, step)


def test_log_and_checkpoint_say_which_corpora_with_which_weights(
    grid, texts, run_of_blend, tmp_path, caplog
):
    record = json.loads((run_of_blend / "global_step4/checkpoint.json").read_text())
    assert record["corpus"] == "poems 0.25, prose 0.75"
    prose = {"corpus": "prose", "weight": 0.75, "documents": 30, "tokens": 15030}
    assert record["corpora"][1] == prose
    folder = without_step_8(run_of_blend, tmp_path / "run")
    with caplog.at_level(logging.INFO):
        train(blended(texts, folder, "train_iters=5", "train_data_weights=[1, 1]"), grid)
    [line] = [line for line in caplog.messages if line.startswith("continuing with other text")]
    assert "poems 0.5, prose 0.5, was poems 0.25, prose 0.75" in line
    assert "train_data_weights: " in caplog.text


def test_ranks_divide_the_windows_of_a_blend(texts, tmp_path):
    """A resume with other ranks reads on: two ranks have what one has."""
    config = blended(texts, tmp_path / "run", "train_micro_batch_size_per_gpu=2")
    parts = open_parts(config.data)
    whole = Batches(blended(texts, tmp_path / "run"), Grid(), parts)
    steps = [whole.next_step()[0] for _ in range(3)]
    ranks = [Batches(config, Grid(rank, 2), parts, used=4, steps=1) for rank in (0, 1)]
    resumed = [rank.next_step()[0] for rank in ranks]
    np.testing.assert_array_equal(np.concatenate(resumed), steps[1])
    described = ranks[1].described(2, 1)
    assert described.startswith("rank 1 had samples 6, 7 of documents ")
    assert "_text_document:" in described


def test_epochs_mean_as_many_steps_as_there_is_text_for_and_a_resumed_run_keeps_them(
    grid, texts, tmp_path, caplog
):
    """30 * 91 tokens: (2730 - 1) // 64 = 42 windows, of which GPT-NeoX leaves one out."""
    folder = tmp_path / "run"
    words = [f"data_path={texts['new_poems']}", "split=1,0,0", "train_epochs=2", "save_interval=10"]
    config = load([], [*OWN, *words, *MODEL, f"save={folder}", f"load={folder}"])
    with caplog.at_level(logging.INFO):
        train(config, grid)
    assert "train_epochs: 2 of 41 windows are 20 steps of 4 windows" in caplog.text
    assert "all 41 samples have been used: they start over" in caplog.text
    trained, meta = read_meta(find(folder))
    assert (meta["step"], meta["config_hash"]) == (20, config.hash)
    assert (trained.training.train_iters, trained.optimizer.lr_decay_iters) == (20, 20)
    assert trained.hash == config.hash
    straight = records(folder)
    shutil.rmtree(folder / "global_step20")
    (folder / "latest").write_text("global_step10")
    train(load([folder / "global_step10/config.yml"]), grid)
    resumed = records(folder)
    for step in range(1, 21):
        assert resumed[step]["loss"] == straight[step]["loss"]
        assert resumed[step]["lr"] == straight[step]["lr"]
    part = open_parts(blended(texts, tmp_path).data)["train"]
    blend = part.epoch(64, seed=5)
    turns = [blend.turns[index] for index in range(len(blend))]
    assert sorted(turns) == [(0, n) for n in range(140)] + [(1, n) for n in range(233)]


def test_text_that_does_not_fit_is_refused_with_its_key(grid, texts, tmp_path):
    other = write(tmp_path, "odd", 80, TOKENIZER | {"hash": "bbbb"})
    bare = write(tmp_path, "bare", 80, {"type": "HFTokenizer", "hash": "b", "vocab_size": 257})
    for path in Path(texts["prose"]).parent.glob("prose_text_document.*"):
        shutil.copy(path, tmp_path / f"copy{path.suffix}")
    one = ["train_data_paths=null", "train_data_weights=null", "valid_data_paths=null"]
    cases = [
        (
            [f"train_data_paths=[{texts['poems']},gone/away]"],
            r"train_data_paths: there are no token files gone/away.bin and gone/away.idx"
            r"[^\n]*\n  train_data_paths: gone/away is a relative path; it was looked for in",
        ),
        (
            [f"valid_data_paths=[{other}]"],
            "odd_text_document: was written by CharLevelTokenizer bb",
        ),
        (
            [f"valid_data_paths=[{tmp_path}/copy]"],
            r"valid_data_paths: .*/copy has the same tokens as .*prose",
        ),
        (
            [*one, f"data_path={bare}", "eod_mask_loss=true", "split=1,0,0", "eval_interval=0"],
            "eod_mask_loss: nothing says which token ends a document",
        ),
    ]
    for words, message in cases:
        with pytest.raises(UserError, match=message):
            train(blended(texts, tmp_path / "run", *words), grid)
    long = [f"data_path={texts['poems']}", "train_epochs=1", "gradient_accumulation_steps=1000"]
    with pytest.raises(UserError, match=r"train_epochs: 1 of .* are less than one step of 4000"):
        train(load([], [*OWN, *long]), grid)
    prefix = tmp_path / "plain_text_document"
    with TokenWriter(prefix, "uint16") as writer:
        for _ in range(20):
            writer.add(list(range(60, 200)))
    plain = [f"data_path={prefix}", "train_iters=1", "split=1,0,0"]
    for key in ("reset_attention_mask", "eod_mask_loss"):
        with pytest.raises(UserError, match=rf"{key}: the documents of .* do not end with token 0"):
            train(load([], tiny(*plain, f"{key}=true")), grid)
    assert not list(tmp_path.glob("run/global*"))


def test_a_tokenizer_that_nobody_chose_is_the_data_s(corpus, tmp_path):
    def tokenizer(*files, words=()):
        return open_text(load(files, [f"data_path={corpus}", "eval_interval=0", *words]))[1]

    config = load([], [*OWN, f"data_path={corpus}", "eval_interval=0"])
    assert open_text(config)[1]["tokenizer"]["type"] == "CharLevelTokenizer"
    config.save(tmp_path / "cell.yml")  # names every key
    again = tokenizer(tmp_path / "cell.yml")
    assert (again["vocab"], again["tokenizer"]["type"]) == (512, "CharLevelTokenizer")
    with pytest.raises(UserError, match=r"GPT2BPETokenizer is not what .* CharLevelTokenizer - "):
        tokenizer(tmp_path / "cell.yml", words=["tokenizer_type=GPT2BPETokenizer"])
    absent = ["tokenizer_type=HFTokenizer", "vocab_file=words.json"]
    with pytest.raises(UserError, match=r"vocab_file: .*\n  vocab_file: words.json is a relative"):
        tokenizer(tmp_path / "cell.yml", words=absent)
    # Another name of the same kind is no other tokenizer.
    named = {"type": "HFTokenizer", "hash": "h", "vocab_size": 9, "eod": 0}
    with TokenWriter(tmp_path / "c", "uint16", meta={"tokenizer": named}) as writer:
        writer.add([1, 2, 0])
    words = [f"data_path={tmp_path / 'c'}", "tokenizer_type=HFGPT2Tokenizer", "eval_interval=0"]
    assert open_text(load([], [*OWN, *words]))[1]["tokenizer"] == named
    assert TokenFile.open(tmp_path / "c").meta["tokenizer"] == named


# --- blended runs are measured corpus by corpus ---------------------------------------------------

EVALUATION = ["eval_tokens=256", "eval_lengths=64,128"]


def test_each_corpus_of_a_blended_run_is_measured_by_itself(texts, run_of_blend, tmp_path):
    source = find(run_of_blend) / "config.yml"
    output = tmp_path / "rows.jsonl"
    rows = evaluate(load([source], EVALUATION), Options(output=output)).rows[output]
    assert [(row["corpus"], row["length"], row["part"]) for row in rows] == [
        *(("new_poems", 64, "valid"), ("new_poems", 128, "valid")),
        *(("new_prose", 64, "valid"), ("new_prose", 128, "valid")),
    ]
    assert {row["trained_on"] for row in rows} == {"poems 0.25, prose 0.75"}
    assert "new_poems" in table(rows)
    alone = load([source], [*EVALUATION, f"valid_data_paths={texts['new_prose']}"])
    [again] = evaluate(alone, Options(lengths=[128], output=tmp_path / "one.jsonl")).rows.values()
    assert again[0]["loss"] == rows[3]["loss"]
    assert again[0]["text"] == rows[3]["text"]

    for suffix in (".bin", ".idx", ".json"):
        shutil.copy(texts["new_prose"] + suffix, tmp_path / f"x{suffix}")
    trained_on = ["train_data_paths=null", "train_data_weights=null"]
    cases = [
        ([*trained_on, f"valid_data_paths={texts['prose']}"], "as valid text was trained on by"),
        (["eval_part=test"], "test_data_paths: not given - name the corpora to read"),
        (
            [f"valid_data_paths=[{texts['new_prose']},{tmp_path / 'x'}]"],
            "are both called new_prose in results - evaluate one at",
        ),
    ]
    for words, message in cases:
        with pytest.raises(UserError, match=message):
            evaluate(load([source], [*EVALUATION, *words]), Options())


def test_a_sweep_knows_the_size_of_a_blend_and_its_steps_before_the_text(texts, tmp_path):
    shape = "num_layers: 2, hidden_size: 64, num_attention_heads: 4, seq_length: 32"
    paths = f"train_data_paths: [{texts['poems']}, {texts['prose']}], eval_interval: 0"
    file = tmp_path / "mine.yml"
    grid = "grid: {train_data_weights: {even: {}, more_prose: {train_data_weights: [1, 3]}}}"
    file.write_text(f"settings: {{{shape}, {paths}, train_iters: 9}}\n{grid}\n")
    sweep = load_sweep(file, tmp_path / "runs")
    assert len({cell.config.hash for cell in sweep.cells}) == 2
    assert corpus_size(sweep.cells[0].config) == {"corpus_documents": 60, "corpus_tokens": 24060}
    gone = paths.replace(texts["prose"], "data/gone")
    file.write_text(f"settings: {{{shape}, {gone}, train_iters: 9}}\n{grid}\n")
    assert absent_data(load_sweep(file, tmp_path / "runs")) == ["data/gone"]
    file.write_text(f"settings: {{{shape}, {paths}, train_epochs: 9}}\n{grid}\n")
    with pytest.raises(UserError, match="train_epochs: a sweep must know its steps before it"):
        load_sweep(file, tmp_path / "runs")


# --- documents apart ------------------------------------------------------------------------------

VOCAB, END = 61, 0
KEYS = ["reset_attention_mask=true", "reset_position_ids=true", "eod_mask_loss=true"]


def trainer(grid, *words: str) -> Trainer:
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
    run = trainer(grid, *words)
    plain = from_config(load([], tiny("train_iters=10")), VOCAB)
    plain.load_state_dict(run.model.state_dict())
    few, many = text(1), text(30, 20, 40)
    # Each micro batch has a mean of its own, and both weigh the same.
    expected = (neox_loss(plain, few) + neox_loss(plain, many)) / 2
    assert run.validate(iter([few, many]), 2) == pytest.approx(expected.item(), rel=1e-6)
    expected.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    found = train_step(run, [few, many])
    assert found["loss"].item() == pytest.approx(expected.item(), rel=1e-6)
    assert float(found["grad_norm"]) == pytest.approx(float(norm), rel=1e-5)
    unmasked = train_step(trainer(grid, *words[1:]), [few, many])
    assert abs(unmasked["loss"].item() - expected.item()) > 1e-4


def test_the_end_of_a_document_counts_and_the_token_after_it_does_not(grid):
    run = trainer(grid, "eod_mask_loss=true")

    def loss(*last_two: int) -> float | None:
        window = torch.full((4, 65), 7)
        window[:, 63:] = torch.tensor(last_two)  # the very last one is a target only
        return run.validate(iter([window]), 1)

    assert loss(END, 8) == loss(END, 9)
    assert loss(8, END) != loss(8, 9)
    nothing = train_step(run, [torch.zeros(4, 65, dtype=torch.long)])
    assert nothing["loss"].item() == float(nothing["grad_norm"]) == 0


@pytest.mark.distributed
def test_two_ranks_average_their_means(forks, grid, letters, tmp_path):
    """As GPT-NeoX: every rank's mean weighs the same, however many targets it has."""
    words = [f"data_path={letters}", "train_iters=1", "split=1,0,0", *KEYS]
    words.append("train_micro_batch_size_per_gpu=1")
    log = tmp_path / "log"
    two = tiny(*words, f"save={tmp_path / 'two'}")
    ranks = forks.start_ranks(2, "train.py", *two, log=log)
    assert [forks.wait(rank) for rank in ranks] == [0, 0], log.read_text()
    # One rank with a micro batch for each of the two.
    one = tiny(*words, f"save={tmp_path / 'one'}", "gradient_accumulation_steps=2")
    train(load([], one), grid)
    first, second = records(tmp_path / "two")[1], records(tmp_path / "one")[1]
    for key in ("loss", "grad_norm"):
        assert first[key] == pytest.approx(second[key], rel=1e-5)
    model, trained, record = load_for_evaluation(tmp_path / "two")
    for name, weight in load_for_evaluation(tmp_path / "one")[0].state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], weight, rtol=0, atol=1e-5)
    assert trained.attention.reset_attention_mask
    assert model.attention.reset_attention_mask
    assert model.end_of_document == record["tokenizer"]["eod"] == 0
    assert math.isfinite(first["loss"])
