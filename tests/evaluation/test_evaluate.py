"""evaluate.py on checkpoints with random weights: the way from the files to the numbers."""

import ast
import itertools
import math
import re
import shutil
import sys
from argparse import Namespace
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from evaluate import add_all_options, as_published, main
from megatron.attention import Choice
from megatron.checkpoints.manifest import read_record, write_record
from megatron.config import load
from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokens import TokenWriter
from megatron.entry import run
from megatron.evaluation import evaluate_checkpoint, loaded_run
from megatron.evaluation.loaded_run import SHAPES_LOSSES, code_fingerprint
from megatron.evaluation.methods import MeasuredAttention
from megatron.folder_lock import owned_file
from megatron.model import from_config
from megatron.results.files import read_rows
from megatron.results.labels import runs
from megatron.results.row import value_of
from tests.support import ROOT

TOKENIZER = {"type": "HFTokenizer", "hash": "aaaa", "vocab_size": 60, "eod": 0}
SHAPE = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16}
EVALUATION = {"eval_lengths": "16,32,64", "eval_tokens": 128, "eval_batch_tokens": 64}
SETTINGS = {**SHAPE, **EVALUATION, "split": "5,4,1", "pos_emb": "mep_free"}
SIZES = np.random.default_rng(3).integers(20, 40, 40)
VALID = int(SIZES[:20].sum())  # documents 20 to 35 are the validation part of split 5,4,1
APART = ["reset_attention_mask=true", "reset_position_ids=true"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A run with a corpus of 40 documents and checkpoints of several encodings."""
    home = tmp_path_factory.mktemp("evaluated")
    text(home / "text", ends=True)
    save(home, 3, "pos_emb=alibi")
    save(home, 4, "pos_emb=rotary")
    save(home, 5, "pos_emb=learned")
    save(home, 6, "pos_emb=sinusoidal", *APART)
    save(home, 7)
    (home / "run/latest").write_text("global_step7")
    return home


@pytest.fixture
def folder(home, tmp_path):
    """A copy of that run, whose files may change."""
    shutil.copytree(home / "run", tmp_path / "run")
    return tmp_path


def text(path, *, ends, tokenizer=TOKENIZER, most=60):
    draw = np.random.default_rng(4)
    with TokenWriter(path, np.uint16, meta={"corpus": "noise", "tokenizer": tokenizer}) as writer:
        for size in SIZES:
            document = draw.integers(1, most, size)
            if ends:
                document[-1] = 0
            writer.add(document)


def configuration(home, *more):
    settings = {**SETTINGS, "data_path": home / "text", "save": home / "run"}
    return load([], [*(f"{key}={value}" for key, value in settings.items()), *more])


def save(home, step, *more):
    config = configuration(home, f"seed={step}", *more)
    checkpoint = home / f"run/global_step{step}"
    checkpoint.mkdir(parents=True)
    save_file(model(config).state_dict(), checkpoint / "model.safetensors")
    config.save(checkpoint / "config.yml")
    facts = {"step": step, "config_hash": config.hash, "vocab": 128, "tokenizer": TOKENIZER}
    write_record(checkpoint, facts | {"commit": None, "files": {}})


def model(config, seed=None):
    # Large first weights, so that the perplexity depends on the text and the context.
    torch.manual_seed(config.training.seed if seed is None else seed)
    built = from_config(config, vocab=128)
    for parameter in built.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return built


def evaluate(*words):
    """Exit status of evaluate.py; a text may hold several words."""
    argv = ["", *(part for word in words for part in str(word).split())]
    with pytest.raises(SystemExit) as ended, patch.object(sys, "argv", argv):
        run(main, purpose="evaluate", options=add_all_options, config_needed=False)
    return ended.value.code


def rows_of(output, *words):
    assert evaluate(*words, "--output", output) == 0
    return read_rows([output])


class OnGPU:
    """What a row asks of a model on a GPU, where there is none."""

    attention_choice = Choice("sdpa")

    def parameters(self):
        yield Namespace(dtype=torch.float32, device=torch.device("cuda"), is_cuda=True)

    def to(self, device, dtype):
        assert (device.type, dtype) == ("cuda", torch.float32)


def test_a_row_of_a_gpu_says_how_exact_its_float32_products_were(home):
    trained = loaded_run.loaded_model(configuration(home, "float32_matmul_precision=high"), None, 7)
    attention = MeasuredAttention.of(trained.config.attention)
    assert "float32_matmul_precision" not in trained.facts(attention)
    on_gpu = replace(trained, model=OnGPU())
    try:
        on_gpu.to(torch.device("cuda"), "fp32")
        row = on_gpu.facts(attention)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert row["float32_matmul_precision"] == "high"
    assert value_of(trained.facts(attention), "float32_matmul_precision") == "highest"


def given(folder, home, *more):
    path = folder / "given.yml"
    configuration(home, *more).save(path)
    return path


def held_out(home, count):
    ids = np.fromfile(home / "text.bin", dtype=np.uint16).astype(np.int64)
    return torch.from_numpy(ids[VALID : VALID + count])


# --- Numbers ---


def test_every_length_gets_its_line_with_the_perplexity_of_the_plain_formula(
    home, tmp_path, capsys, caplog
):
    rows = rows_of(tmp_path / "new/results.jsonl", given(tmp_path, home, "seed=7"))
    config = configuration(home, "seed=7")
    reference = model(config).double().eval()
    assert [row["length"] for row in rows] == [16, 32, 64]
    facts = {"pos_emb": "mep_free", "step": 7, "config_hash": config.hash, "seed": 7}
    facts |= {"corpus": "noise", "part": "valid", "protocol": "equal_tokens"}
    facts |= {"train_length": 16, "tokenizer": "aaaa", "tokens": 128}
    for row in rows:
        windows = held_out(home, 129).unfold(0, row["length"] + 1, row["length"])
        logits = reference(windows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).item()
        assert row["loss"] == pytest.approx(loss, abs=1e-5)
        assert row["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
        assert row | facts == row
        logged = f"equal_tokens {row['length']}: perplexity {row['perplexity']:.2f}, "
        assert sum(message.startswith(logged) for message in caplog.messages) == 1
    _, header, *_ = capsys.readouterr().out.splitlines()
    assert header.split() == ["pos_emb", "16*", "32", "64"]


def test_documents_are_apart_as_in_the_training_unless_the_configuration_says_otherwise(
    home, tmp_path
):
    apart = rows_of(tmp_path / "apart.jsonl", f"--checkpoint {home}/run --step 6")
    reference = model(configuration(home, "seed=6", "pos_emb=sinusoidal")).double().eval()
    for row in apart:
        losses = []
        for window in held_out(home, 129).unfold(0, row["length"] + 1, row["length"]):
            ends = [*(window[:-1] == 0).nonzero().flatten().tolist(), row["length"] - 1]
            begin = 0
            for end in dict.fromkeys(ends):
                logits = reference(window[None, begin : end + 1])[0]
                losses.append(F.cross_entropy(logits, window[begin + 1 : end + 2], reduction="sum"))
                begin = end + 1
        assert row["loss"] == pytest.approx(sum(losses).item() / 128, abs=1e-5)
        assert row["reset_attention_mask"]
        assert row["reset_position_ids"]
    config = given(tmp_path, home, "pos_emb=sinusoidal")
    across, *_ = rows_of(tmp_path / "a.jsonl", config, "--step 6 reset_attention_mask=false")
    assert across["text"] == apart[0]["text"]  # the same targets
    assert abs(across["loss"] - apart[0]["loss"]) > 1e-3


@pytest.mark.distributed
def test_an_evaluation_repeats_and_two_processes_give_the_rows_of_one(home, forks, tmp_path):
    words = ["--lengths", "16", "--windows", "5", "--protocol", "sliding", "paper", "position"]
    file = given(tmp_path, home)
    output, log = tmp_path / "two.jsonl", tmp_path / "log"
    forks.run_ranks(2, "evaluate.py", file, *words, "--output", output, log=log)
    assert log.read_text().count("perplexity on noise valid, 128 tokens") == 2
    clock = {"seconds", "tokens_per_second"}
    several = [read_rows([output]), rows_of(tmp_path / "one.jsonl", file, *words)]
    for rows in several:
        for row, key in itertools.product(rows, clock):
            del row[key]
    assert several[0] == several[1]


def test_learned_positions_say_where_they_end_instead_of_a_number(folder, capsys):
    assert evaluate("--checkpoint", folder / "run", "--step 5") == 0
    reason = "pos_emb: learned positions end at 16, so length 32 cannot be computed"
    assert f"learned: n/a at 32, 64: {reason}" in capsys.readouterr().out
    rows = read_rows([folder / "run/evaluation/text-valid-global_step5.jsonl"])
    assert [row["perplexity"] is None for row in rows] == [False, True, True]
    assert [row["tokens"] for row in rows] == [128, 128, 128]


def move_checkpoints(home, folder, digest):
    """Let copied checkpoints name their own folder and another tokenizer."""
    for file in folder.glob("run/*/config.yml"):
        file.write_text(file.read_text().replace(str(home), str(folder)))
        record = read_record(file.parent)
        write_record(file.parent, record | {"tokenizer": record["tokenizer"] | {"hash": digest}})


def test_a_row_has_bits_per_byte_where_the_bytes_can_be_counted(home, folder, capsys):
    tokenizer = build_tokenizer("CharLevelTokenizer")
    move_checkpoints(home, folder, tokenizer.hash)
    text(folder / "text", ends=True, tokenizer={**TOKENIZER, "hash": tokenizer.hash})
    words = (f"--checkpoint {folder}/run", "tokenizer_type=CharLevelTokenizer")
    words += ("--lengths 16 32 --protocol tail --tail 8",)
    row, _ = rows_of(folder / "b.jsonl", *words)
    region = held_out(folder, 129)
    targets = torch.cat([region[end - 7 : end + 1] for end in range(32, 129, 8)])
    assert row["bytes"] == int(tokenizer.token_bytes()[targets].sum()) < row["tokens"]
    bits = row["loss"] * row["tokens"] / math.log(2) / row["bytes"]
    assert row["bits_per_byte"] == pytest.approx(bits, rel=1e-12)
    assert f"{bits:.4f}" in capsys.readouterr().out

    # Without the tokenizer nothing is known.
    text(folder / "strange", ends=True, tokenizer={**TOKENIZER, "hash": "other"})
    move_checkpoints(home, folder, "other")
    row, _ = rows_of(folder / "c.jsonl", *words, f"data_path={folder / 'strange'}")
    assert "bits_per_byte" not in row


# --- Which checkpoint, and where rows go ---


def test_the_checkpoint_alone_says_all_and_its_folder_gets_the_rows(home, folder):
    own_config = folder / "run/global_step7/config.yml"
    assert evaluate("--checkpoint", folder / "run", "--lengths 16") == 0
    assert evaluate(own_config, "eval_part=test eval_tokens=64 --lengths 32") == 0
    variants = "--window none train_length 8 --lengths 16"
    assert evaluate("--checkpoint", folder / "run", variants, "--protocol paper --dtype bf16") == 0
    methods = "--method rerope lm_infinite,sinks=2,window=14"
    assert evaluate("--checkpoint", folder / "run", "--step 4 --lengths 16", methods) == 0
    names = {path.name for path in (folder / "run/evaluation").glob("*.jsonl")}
    assert names == {
        "text-valid-global_step7.jsonl",
        "text-test-global_step7.jsonl",
        "text-valid-global_step7-paper-bf16.jsonl",
        "text-valid-global_step7-paper-bf16-window=train_length.jsonl",
        "text-valid-global_step7-paper-bf16-window=8.jsonl",
        "text-valid-global_step4-method=rerope,window=8.jsonl",
        "text-valid-global_step4-method=lm_infinite,window=14,sinks=2,limit=14.jsonl",
    }
    (row,) = read_rows([folder / "run/evaluation/text-test-global_step7.jsonl"])
    assert (row["step"], row["part"], row["tokens"]) == (7, "test", 64)


def test_of_load_and_save_the_one_with_a_checkpoint_is_measured(home, tmp_path, capsys):
    words = ["--lengths", "16", "--output", tmp_path / "results.jsonl"]
    nothing = tmp_path / "nothing-yet"
    assert evaluate(given(tmp_path, home), f"load={nothing}", *words) == 0
    assert evaluate(given(tmp_path, home), f"load={home}/run", f"save={nothing}", *words) == 0
    assert evaluate(given(tmp_path, home), f"load={home}/run/global_step3", *words) == 1
    both = r"load \(.*global_step3\) and save \(.*run\) both have one - choose one with"
    assert re.search(both, capsys.readouterr().err)


def test_no_training_steps_measure_as_kerple_and_mep_do(home, folder, capsys):
    # As their evaluation files: both parts at seq-length-val, eval-iters batches each.
    file = folder / "eval.yml"
    lines = [f"{key}: {value}" for key, value in SETTINGS.items() if key != "eval_lengths"]
    lines += ["train-iters: 0", "eval-iters: 2", "eval-interval: 2", "seq-length-val: 32"]
    lines += ["train_micro_batch_size_per_gpu: 2", f"data-path: {home}/text"]
    file.write_text("\n".join([*lines, f"load: {folder}/run"]))
    assert evaluate(file) == 0
    places = {"valid": 3 * 4, "test": 0}  # three validations before step 7, of 4 windows each
    for part, start in places.items():
        (row,) = read_rows([folder / f"run/evaluation/text-{part}-global_step7-paper.jsonl"])
        words = f"eval_part={part} --protocol paper --windows 4 --start {start} --lengths 32"
        (same,) = rows_of(folder / f"{part}.jsonl", f"--checkpoint {folder}/run", words)
        for key in ("protocol", "part", "length", "windows", "start", "text", "loss"):
            assert same[key] == row[key]
    (row,) = rows_of(folder / "own.jsonl", file, "--lengths 16")
    assert row["protocol"] == "equal_tokens"
    capsys.readouterr()
    as_published(load([file]))  # as train.py does
    assert "protocol paper" in capsys.readouterr().out
    assert evaluate(file, "eval_iters=0") == 1
    assert "eval_iters: 0 batches leave nothing to measure" in capsys.readouterr().err


# --- Protocols and variants ---


def test_several_protocols_and_variants_of_one_model_come_from_one_call(home, tmp_path, capsys):
    protocols = "--protocol equal_tokens tail --tail 8 --lengths 16 64"
    variants = "--window none train_length --paper-precision off on"
    output = tmp_path / "all.jsonl"
    rows = rows_of(output, given(tmp_path, home), protocols, variants)
    keys = ("protocol", "window", "paper_precision", "length")
    loss = {tuple(row.get(key) for key in keys): row["loss"] for row in rows}
    assert len(loss) == len(rows) == 2 * 2 * (2 + 2)
    for protocol in ("equal_tokens", "tail"):
        for length, matters in ((16, False), (64, True)):
            plain = loss[protocol, None, None, length]
            windowed = loss[protocol, "train_length", None, length]
            assert (abs(plain - windowed) > 1e-6) == matters, "beyond the training length only"
            assert 0 < abs(plain - loss[protocol, None, True, length]) < 0.1
    printed = capsys.readouterr().out
    assert printed.count("pos_emb") == 2
    assert "mep_free, window 16, bfloat16 positions" in printed


def test_each_method_has_rows_of_its_own_that_name_it(home, tmp_path, capsys):
    words = f"--checkpoint {home}/run --step 4 --lengths 16 64"
    methods = "none dynamic_ntk rerope leaky_rerope,factor=4 self_extend,window=8,group=2"
    output = tmp_path / "a.jsonl"
    stretched = "--method yarn,factor=4.0 pi,factor=4 --method ntk,factor=4"
    first = rows_of(output, words, f"--method {methods} lm_infinite,sinks=2 {stretched}")
    rows = rows_of(output, words, "--method rerope,window=8 rerope,window=4")
    assert [row for row in rows if row in first] == first, "kept, with the seconds that it took"
    assert {row.get("method") for row in rows} == {
        None,
        "rerope,window=8",
        "rerope,window=4",
        "leaky_rerope,window=8,factor=4",
        "self_extend,window=8,group=2",
        "lm_infinite,window=16,sinks=2,limit=16",
        "dynamic_ntk,factor=1,step=16",
        *("yarn,factor=4", "pi,factor=4", "ntk,factor=4"),
    }
    names = ["ReRoPE (window=8)", "ReRoPE (window=4)", "Leaky ReRoPE", "Self-Extend", "LM-Infinite"]
    names += ["dynamic NTK", "YaRN ×4", "PI ×4", "NTK ×4"]
    assert {"rotary", *(f"rotary, {name}" for name in names)} == set(runs(rows))
    rows += rows_of(tmp_path / "sinks.jsonl", words, "--window 14 --sinks none 2")
    assert len({row["loss"] for row in rows if row["length"] == 64}) == 12
    clip = f"--checkpoint {home}/run --step 3 --lengths 16 64 --clip-distance none 15"
    clipped = rows_of(tmp_path / "clip.jsonl", clip)
    loss = {(row.get("clip_distance"), row["length"]): row["loss"] for row in clipped}
    assert loss[None, 16] == loss[15, 16]
    assert abs(loss[None, 64] - loss[15, 64]) > 1e-6


def test_a_row_has_losses_of_single_targets_if_they_are_asked_for(folder, home):
    tokenizer = build_tokenizer("CharLevelTokenizer")
    move_checkpoints(home, folder, tokenizer.hash)
    text(folder / "text", ends=True, tokenizer={**TOKENIZER, "hash": tokenizer.hash})
    words = [f"--checkpoint {folder}/run", "tokenizer_type=CharLevelTokenizer"]
    words += ["--lengths 16 64 --protocol tail --tail 12 eval_tokens=256"]
    output = folder / "a.jsonl"
    without = rows_of(output, *words)
    rows = rows_of(output, *words, "--keep-losses 30")
    reference = model(configuration(home, "seed=7")).double().eval()
    region = held_out(folder, 257)
    for row, before in zip(rows, without, strict=True):
        assert "token_losses" not in before
        assert row["block_losses"] == before["block_losses"]
        expected = []
        for end in (64, 80):  # two ends of 12 are 24 of the 30
            window = region[end - row["length"] : end + 1]
            losses = F.cross_entropy(reference(window[None, :-1])[0], window[1:], reduction="none")
            expected += losses[-12:].tolist()
        np.testing.assert_allclose(row["token_losses"], expected, atol=1e-5)


# --- Asked again ---


def test_what_is_there_is_not_measured_again_unless_the_question_is_another(home, folder):
    output = folder / "a.jsonl"
    words = f"--checkpoint {folder}/run"
    first = rows_of(output, words, "--lengths 32")
    rows = rows_of(output, words, "--lengths 16 32 --window none 8 16 train_length")
    assert rows[0] == first[0], "with the seconds that it took"
    windows = {row.get("window"): row["loss"] for row in rows if row["length"] == 32}
    assert set(windows) == {None, 8, 16}, "16 tokens are the length of the training"
    assert len(set(windows.values())) == 3

    # A pass by position is measured again for lengths that its row has no mean of.
    position = f"{words} --protocol position --lengths 64"
    rows_of(folder / "p.jsonl", position)
    (row,) = rows_of(folder / "p.jsonl", position, "20")
    assert 20 in row["position_edges"]

    weights = folder / "run/global_step7/model.safetensors"
    save_file(model(configuration(home), seed=0).state_dict(), weights)
    assert rows_of(output, words, "--lengths 32")[0]["loss"] != first[0]["loss"]


def test_a_killed_evaluation_keeps_its_finished_lengths(home, tmp_path, monkeypatch):
    output = tmp_path / "a.jsonl"
    words = f"--checkpoint {home}/run"
    whole = rows_of(tmp_path / "whole.jsonl", words)
    measured = evaluate_checkpoint.measured

    def killed(model, windows, **more):
        if windows.length == 64:
            raise KeyboardInterrupt
        return measured(model, windows, **more)

    with monkeypatch.context() as patch:
        patch.setattr(evaluate_checkpoint, "measured", killed)
        assert evaluate(words, "--output", output) != 0
    finished = read_rows([output])
    assert [row["length"] for row in finished] == [16, 32]
    monkeypatch.setattr(loaded_run, "commit", lambda: "another")  # with the same code
    rows = rows_of(output, words)
    assert rows[:2] == finished
    assert rows[2]["window_losses"] == whole[2]["window_losses"]


# What a measurement imports and a loss does not depend on.
SHAPES_NO_LOSS = {
    "address.py",
    "cli_errors.py",
    "commit.py",
    "errors.py",
    "files.py",
    "folder_lock.py",
    "process.py",
    "results",
    "strict_json.py",
    "strict_yaml.py",
}


def imports(path):
    """Dotted names of everything that a file imports."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))


def test_all_code_that_shapes_a_loss_changes_the_fingerprint(tmp_path, monkeypatch):
    files, waiting = set(), ["megatron.evaluation.evaluate_checkpoint"]
    while waiting:
        path = ROOT / waiting.pop().replace(".", "/")
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if path not in files and path.exists():
            files.add(path)
            waiting += imports(path)
    rooms = {path.relative_to(ROOT / "megatron").parts[0] for path in files} - {"__init__.py"}
    assert rooms <= {*SHAPES_LOSSES} | SHAPES_NO_LOSS

    monkeypatch.setattr(loaded_run, "PACKAGE", tmp_path)
    monkeypatch.setattr(loaded_run, "SHAPES_LOSSES", ("room", "file.py"))
    (tmp_path / "room").mkdir()
    fingerprints = set()
    for name, text in (("file.py", ""), ("room/any.py", ""), ("room/any.py", "changed = True")):
        (tmp_path / name).write_text(text)
        fingerprints.add(code_fingerprint())
    assert len(fingerprints) == 2, "an empty file changes nothing"


# --- What is refused ---


def test_what_cannot_be_evaluated_is_one_message_and_writes_nothing(home, folder, capsys):
    """tests/bad_inputs has more."""
    text(folder / "other", ends=False, tokenizer={**TOKENIZER, "hash": "bbbb"})
    text(folder / "endless", ends=False)
    many = {**TOKENIZER, "vocab_size": 300}
    text(folder / "high", ends=False, tokenizer=many, most=201)
    file, run_folder = given(folder, home), f"--checkpoint {home}/run"
    cases = {
        f"{file} data_path={folder}/other": "by HFTokenizer bbbb, .* trained with HFTokenizer aaaa",
        f"{file} data_path={folder}/high": r"has token 200, .* knows the tokens 0 to 127",
        f"{run_folder} --step 6 data_path={folder}/endless": "reset_attention_mask: the documents",
        f"{file} --window wide": "argument --window: wide is not .* 16,777,216, or none, or train_",
        f"{file} --method rerop": "--method rerop: no such method; did you mean rerope",
        f"{file} --method ntk": "--method ntk: factor= is missing",
        f"{file} --logn-scale yes": "argument --logn-scale: yes: must be on or off",
        f"{run_folder} --step 4 --sinks 2 --clip-distance 5 --method rerope rerope,window=17": (
            "--sinks 2: without a window(.|\\n)*--clip-distance 5: rotary has no table by distance"
            "(.|\\n)*rerope,window=8: has no meaning with blockwise"
        ),
    }
    for words, message in cases.items():
        assert evaluate(words) == (2 if message.startswith("argument") else 1), words
        error = capsys.readouterr().err
        assert "Traceback" not in error
        assert re.search(message, error), (words, error)
    assert not list(folder.rglob("*.jsonl"))


def test_a_second_evaluation_into_one_file_is_refused_before_it_measures(home, tmp_path, capsys):
    output = tmp_path / "a.jsonl"
    words = [f"--checkpoint {home}/run --lengths 16", "--output", output]
    with owned_file(output, "--output"):
        assert evaluate(*words) == 1
    message = rf"--output: {output} is in use by another process"
    assert re.search(message, capsys.readouterr().err)
    assert not output.exists()
    assert evaluate(*words) == 0
    assert not list(tmp_path.glob(".*"))
