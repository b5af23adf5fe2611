"""Runs on a blend of corpora: what they read, log and keep, how they resume and are measured."""

import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest

from megatron.checkpoints.read import read_meta
from megatron.checkpoints.saved import find
from megatron.config import load
from megatron.data.parts import open_parts
from megatron.data.tokens import TokenFile, TokenWriter
from megatron.errors import UserError
from megatron.evaluation.probes.run import Options as ProbeOptions
from megatron.evaluation.probes.run import probe
from megatron.evaluation.run import Options, evaluate
from megatron.results.table import table
from megatron.sweeps.plan import load_sweep
from megatron.sweeps.state import _corpus_size, absent_data
from megatron.training.run import train
from megatron.training.text import Text
from tests.support import together
from tests.training.conftest import MODEL, records, tiny

TOKENIZER = {"type": "CharLevelTokenizer", "hash": "aaaa", "vocab_size": 257, "eod": 256}


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
    words = [word for word in tiny() if not word.startswith("tokenizer_type")]
    return load(
        [],
        [
            *words,
            f"train_data_paths=[{texts['poems']},{texts['prose']}]",
            "train_data_weights=[1, 3]",
            f"valid_data_paths=[{texts['new_poems']},{texts['new_prose']}]",
            *("train_iters=8", "save_interval=4", "eval_interval=4", "eval_iters=2"),
            *(f"save={folder}", f"load={folder}", *MODEL, *more),
        ],
    )


@pytest.fixture(scope="session")
def run_of_blend(grid, texts, tmp_path_factory):
    """The folder of an uninterrupted run of eight steps; not to be changed."""
    folder = tmp_path_factory.mktemp("blended")
    train(blended(texts, folder), grid)
    return folder


def without(run, step, folder):
    """A copy of a run that was killed before that step."""
    shutil.copytree(run, folder)
    shutil.rmtree(folder / f"global_step{step}")
    (folder / "latest").write_text("global_step4")
    return folder


@pytest.mark.parametrize("how", [[], ["num_workers=2"]], ids=["alone", "workers"])
def test_a_resumed_blend_repeats_the_uninterrupted_run_to_the_last_bit(
    grid, texts, run_of_blend, tmp_path, how
):
    folder = without(run_of_blend, 8, tmp_path / "run")
    train(blended(texts, folder, *how), grid)
    for kind in ("train", "valid"):
        straight, resumed = records(run_of_blend, kind), records(folder, kind)
        assert straight.keys() == resumed.keys()
        for step in straight:
            assert straight[step]["loss"] == resumed[step]["loss"], (kind, step)


def test_a_copy_of_text_that_is_trained_on_is_not_held_out(texts, tmp_path):
    for path in Path(texts["prose"]).parent.glob("prose_text_document.*"):
        shutil.copy(path, tmp_path / f"copy{path.suffix}")
    config = blended(texts, tmp_path / "run", f"valid_data_paths=[{tmp_path}/copy]")
    with pytest.raises(
        UserError, match=r"valid_data_paths: .*/copy has the same tokens as .*prose"
    ):
        open_parts(config.data)
    open_parts(config.data, ["valid"])


def test_log_and_checkpoint_say_which_corpora_with_which_weights(grid, texts, tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        train(blended(texts, tmp_path / "run", "train_iters=1"), grid)
    assert (
        "train: poems 0.25 (30 documents, 9,030 tokens), prose 0.75 (30 documents, 15,030 tokens)"
        in caplog.messages
    )
    assert any(line.startswith("valid: new_poems 0.5 (30 ") for line in caplog.messages)
    assert " is read " not in caplog.text
    record = json.loads((tmp_path / "run/global_step1/checkpoint.json").read_text())
    assert record["corpus"] == "poems 0.25, prose 0.75"
    prose = {"corpus": "prose", "weight": 0.75, "documents": 30, "tokens": 15030}
    assert record["corpora"][1] == prose


def test_a_corpus_that_a_blend_reads_again_is_named(texts, tmp_path, caplog):
    part = open_parts(blended(texts, tmp_path / "run").data)["train"]
    with caplog.at_level(logging.INFO):
        part.samples(length=60, seed=1, num_samples=903)
    # 903 * 1.005 samples (GPT-NeoX has that surplus), a quarter of them from 9,030 tokens.
    assert caplog.messages[:2] == [
        "train: poems is read 1.5 times, its weight asks for 227 samples of 60 tokens",
        "train: prose is read 2.7 times, its weight asks for 681 samples of 60 tokens",
    ]


@pytest.mark.parametrize(
    "word", ["train_data_weights=[1, 1]", "train_data_paths=[{prose},{poems}]"]
)
def test_a_run_that_goes_on_with_another_blend_says_so(
    grid, texts, run_of_blend, tmp_path, caplog, word
):
    folder = without(run_of_blend, 8, tmp_path / "run")
    with caplog.at_level(logging.INFO):
        train(blended(texts, folder, "train_iters=5", word.format(**texts)), grid)
    was = "was poems 0.25 of 9,030 tokens + prose 0.75 of 15,030 tokens"
    [line] = [line for line in caplog.messages if line.startswith("continuing with other text")]
    assert was in line
    assert f"continuing with another {word.split('=')[0]}: " in caplog.text


def test_ranks_divide_the_windows_of_a_blend(texts, grid, tmp_path):
    """A resume with other ranks reads on: two ranks have what one has."""
    config = blended(texts, tmp_path / "run", "train_micro_batch_size_per_gpu=2")
    parts = open_parts(config.data)
    whole = Text(blended(texts, tmp_path / "run"), grid, parts)

    def of_rank(rank, used):
        return Text(config, _Two(grid, rank), parts, used)

    steps = [whole.next_step()[0] for _ in range(3)]
    resumed = [of_rank(rank, used=4).next_step()[0] for rank in (0, 1)]
    np.testing.assert_array_equal(np.concatenate(resumed), steps[1])
    described = whole.documents_of(whole.windows_of(4, 0))
    assert {name.split(":")[0] for name in described} == {
        "poems_text_document",
        "prose_text_document",
    }


class _Two:
    """A rank of two, as far as text asks."""

    def __init__(self, grid, rank):
        self.ranks, self.rank, self.device = 2, rank, grid.device


def test_epochs_mean_as_many_steps_as_there_is_text_for_and_a_resumed_run_keeps_them(
    grid, texts, tmp_path, caplog
):
    """30 * 91 tokens: (2730 - 1) // 64 = 42 windows, of which GPT-NeoX leaves one out."""
    folder = tmp_path / "run"
    shape = [word for word in tiny() if not word.startswith("tokenizer_type")]
    words = [f"data_path={texts['new_poems']}", "split=1,0,0", "train_epochs=2", "save_interval=10"]
    config = load([], [*shape, *words, *MODEL, f"save={folder}", f"load={folder}"])
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


def test_an_epoch_of_a_blend_has_every_window_once(texts, tmp_path):
    config = blended(texts, tmp_path)
    part = open_parts(config.data)["train"]
    blend = part.epoch(64, seed=5)
    assert len(blend) == part.windows_of_an_epoch(64) == 140 + 233
    turns = [blend.turns[index] for index in range(len(blend))]
    assert sorted(turns) == [(0, n) for n in range(140)] + [(1, n) for n in range(233)]


def test_too_few_windows_for_a_step_are_a_message(grid, texts, tmp_path):
    shape = [word for word in tiny() if not word.startswith("tokenizer_type")]
    words = [f"data_path={texts['poems']}", f"save={tmp_path}", "train_epochs=1"]
    config = load([], [*shape, *words, "gradient_accumulation_steps=1000"])
    with pytest.raises(UserError, match=r"train_epochs: 1 of .* are less than one step of 4000"):
        train(config, grid)


def test_a_missing_corpus_among_several_is_named_with_its_key(grid, texts, tmp_path):
    config = blended(texts, tmp_path / "run", f"train_data_paths=[{texts['poems']},gone/away]")
    with pytest.raises(UserError) as raised:
        train(config, grid)
    assert str(raised.value).startswith(
        "train_data_paths: there are no token files gone/away.bin and gone/away.idx"
    )
    assert "train_data_paths: gone/away is a relative path; it was looked for in" in str(
        raised.value
    )


def test_corpora_of_different_tokenizers_are_refused(grid, texts, tmp_path):
    other = write(tmp_path, "odd", 80, TOKENIZER | {"hash": "bbbb"})
    config = blended(texts, tmp_path / "run", f"valid_data_paths=[{other}]")
    with pytest.raises(
        UserError, match="odd_text_document: was written by CharLevelTokenizer bbbb"
    ):
        train(config, grid)


def test_processes_that_start_a_blend_together_read_the_same_and_leave_whole_caches(
    texts, tmp_path
):
    paths = []
    for name in ("poems", "prose"):
        for suffix in (".bin", ".idx", ".json"):
            shutil.copy(texts[name] + suffix, tmp_path / f"{name}{suffix}")
        paths.append(str(tmp_path / name))
    small = load([], ["num_layers=2", "hidden_size=8", "num_attention_heads=2", "seq_length=8"])
    section = small.data.model_copy(update={"train_data_paths": tuple(paths)})

    def windows(barrier):
        barrier.wait()
        blend = open_parts(section, ["train"])["train"].samples(8, 1235, 50)
        return [blend[index].tolist() for index in range(40)]

    got = together(windows, 5)
    assert got == got[:1] * 5
    for name in ("poems", "prose"):
        [folder] = (tmp_path / f"{name}_index_maps").glob("[0-9a-f]*")
        assert len(list(folder.iterdir())) == 3


EVALUATION = ["eval_tokens=256", "eval_lengths=64,128"]


def test_each_corpus_of_a_blended_run_is_measured_by_itself(texts, run_of_blend, tmp_path):
    config = load([find(run_of_blend) / "config.yml"], EVALUATION)
    rows = evaluate(config, Options(output=tmp_path / "rows.jsonl")).rows[tmp_path / "rows.jsonl"]
    assert [(row["corpus"], row["length"], row["part"]) for row in rows] == [
        *(("new_poems", 64, "valid"), ("new_poems", 128, "valid")),
        *(("new_prose", 64, "valid"), ("new_prose", 128, "valid")),
    ]
    assert {row["trained_on"] for row in rows} == {"poems 0.25, prose 0.75"}
    assert "new_poems" in table(rows)
    alone = load(
        [find(run_of_blend) / "config.yml"], [*EVALUATION, f"valid_data_paths={texts['new_prose']}"]
    )
    [again] = evaluate(alone, Options(lengths=[128], output=tmp_path / "one.jsonl")).rows.values()
    assert again[0]["loss"] == rows[3]["loss"]
    assert again[0]["text"] == rows[3]["text"]


def test_text_of_the_training_is_not_held_out(texts, run_of_blend, tmp_path):
    config = find(run_of_blend) / "config.yml"
    words = [
        "train_data_paths=null",
        "train_data_weights=null",
        f"valid_data_paths={texts['prose']}",
    ]
    with pytest.raises(UserError, match="prose_text_document as valid text was trained on by"):
        evaluate(load([config], [*EVALUATION, *words]), Options())
    with pytest.raises(UserError, match="test_data_paths: not given - name the corpora to read"):
        evaluate(load([config], [*EVALUATION, "eval_part=test"]), Options())


def test_a_run_on_one_corpus_can_be_measured_on_several_others(grid, texts, trained, tmp_path):
    others = [write(tmp_path, name, 100, {}) for name in ("first", "second")]
    words = ["data_path=null", f"valid_data_paths={others}".replace("'", "")]
    config = load([find(trained) / "config.yml"], [*EVALUATION, *words])
    output = tmp_path / "rows.jsonl"
    rows = evaluate(config, Options(lengths=[64], output=output)).rows[output]
    assert [row["corpus"] for row in rows] == ["first", "second"]
    assert not any("trained_on" in row for row in rows)
    whole = load([find(trained) / "config.yml"], [])
    words[1] = f"valid_data_paths={whole.data.data_path}"
    with pytest.raises(UserError, match="as valid text was trained on by"):
        evaluate(load([find(trained) / "config.yml"], [*EVALUATION, *words]), Options())


def test_a_sweep_knows_the_size_of_a_blend_and_its_steps_before_the_text(texts, tmp_path):
    shape = "num_layers: 2, hidden_size: 64, num_attention_heads: 4, seq_length: 32"
    paths = f"train_data_paths: [{texts['poems']}, {texts['prose']}], eval_interval: 0"
    file = tmp_path / "mine.yml"
    grid = "grid: {train_data_weights: {even: {}, more_prose: {train_data_weights: [1, 3]}}}"
    file.write_text(f"settings: {{{shape}, {paths}, train_iters: 9}}\n{grid}\n")
    sweep = load_sweep(file, tmp_path / "runs")
    assert len({cell.config.hash for cell in sweep.cells}) == 2
    assert _corpus_size(sweep.cells[0]) == {"corpus_documents": 60, "corpus_tokens": 24060}
    assert absent_data(sweep) == []
    gone = paths.replace(texts["prose"], "data/gone")
    file.write_text(f"settings: {{{shape}, {gone}, train_iters: 9}}\n{grid}\n")
    assert absent_data(load_sweep(file, tmp_path / "runs")) == ["data/gone"]
    file.write_text(f"settings: {{{shape}, {paths}, train_epochs: 9}}\n{grid}\n")
    with pytest.raises(UserError, match="train_epochs: a sweep must know its steps before it"):
        load_sweep(file, tmp_path / "runs")


def test_probes_ask_for_one_corpus(run_of_blend):
    config = load([find(run_of_blend) / "config.yml"], EVALUATION)
    with pytest.raises(UserError, match="valid_data_paths: probes read one corpus - give one of"):
        probe(config, ProbeOptions())


def test_two_corpora_of_one_name_are_not_measured_together(texts, run_of_blend, tmp_path):
    for suffix in (".bin", ".idx", ".json"):
        shutil.copy(texts["new_prose"] + suffix, tmp_path / f"x{suffix}")
    assert TokenFile.open(tmp_path / "x").meta["corpus"] == "new_prose"
    word = f"valid_data_paths=[{texts['new_prose']},{tmp_path / 'x'}]"
    config = load([find(run_of_blend) / "config.yml"], [*EVALUATION, word])
    with pytest.raises(UserError, match="are both called new_prose in results - evaluate one at"):
        evaluate(config, Options())
