"""evaluate.py on checkpoints with random weights: the way from the files to the numbers."""

import json
import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from evaluate import add_options, main
from megatron.config import load
from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokens import TokenWriter
from megatron.entry import run
from megatron.evaluation.resume import WindowFile
from megatron.folder_lock import owned_file
from megatron.model import from_config
from megatron.parallel import threads
from megatron.results.files import read_results, write_lines
from megatron.results.table import by_length
from tests.support import run as run_script

TOKENIZER = {"type": "HFTokenizer", "hash": "aaaa", "vocab_size": 60, "eod": 0}
SHAPE = [
    "num_layers=2",
    "hidden_size=32",
    "num_attention_heads=4",
    "seq_length=16",
    "eval_lengths=16,32,64",
]
EVALUATION = ["eval_tokens=128", "eval_batch_tokens=64", "split=5,4,1", "pos_emb=mep_free"]


@pytest.fixture
def folder(tmp_path):
    """A run with a corpus of 40 documents and checkpoints after 3 and 7 steps."""
    generator = np.random.default_rng(3)
    with TokenWriter(
        tmp_path / "text", np.uint16, meta={"corpus": "noise", "tokenizer": TOKENIZER}
    ) as writer:
        for size in generator.integers(20, 40, 40):
            writer.add(generator.integers(0, 60, size))
    for step in (3, 7):
        save(tmp_path, step)
    (tmp_path / "run/latest").write_text("global_step7")
    return tmp_path


def configuration(folder, *more):
    return load([], [*SHAPE, *EVALUATION, f"data_path={folder}/text", f"save={folder}/run", *more])


def save(folder, step, *more):
    config = configuration(folder, f"seed={step}", *more)
    checkpoint = folder / f"run/global_step{step}"
    checkpoint.mkdir(parents=True)
    torch.manual_seed(step)
    save_file(model(config).state_dict(), checkpoint / "model.safetensors")
    config.save(checkpoint / "config.yml")
    facts = {
        "step": step,
        "config_hash": config.hash,
        "vocab": 128,
        "tokenizer": TOKENIZER,
        "commit": None,
    }
    (checkpoint / "checkpoint.json").write_text(json.dumps(facts))


def model(config):
    # Large first weights, so that the perplexity depends on the text and the context.
    built = from_config(config, vocab=128)
    for parameter in built.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return built


def evaluate(*words):
    """Exit status of evaluate.py; a text may hold several words."""
    argv = [part for word in words for part in str(word).split()]
    with pytest.raises(SystemExit) as ended:
        run(main, purpose="evaluate", options=add_options, config_needed=False, argv=argv)
    return ended.value.code


def given(folder, *more):
    path = folder / "given.yml"
    configuration(folder, *more).save(path)
    return path


def test_every_length_gets_its_line_with_the_perplexity_of_the_plain_formula(
    folder, capsys, caplog
):
    assert evaluate(given(folder, "seed=7"), "--output", folder / "new/results.jsonl") == 0
    rows = read_results([folder / "new/results.jsonl"])
    config = configuration(folder, "seed=7")
    torch.manual_seed(7)
    reference = model(config).double().eval()
    text = np.fromfile(folder / "text.bin", dtype=np.uint16).astype(np.int64)
    sizes = np.random.default_rng(3).integers(20, 40, 40)
    valid = sizes[:20].sum()  # documents 20 to 35 are the validation part of split 5,4,1
    text = torch.from_numpy(text[valid : valid + 129])
    assert [row["length"] for row in rows] == [16, 32, 64]
    for row in rows:
        windows = text.unfold(0, row["length"] + 1, row["length"])
        logits = reference(windows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).item()
        assert row["loss"] == pytest.approx(loss, abs=1e-5)
        assert row["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
        assert (row["windows"], row["tokens"]) == (128 // row["length"], 128)
        assert (row["pos_emb"], row["step"], row["config_hash"]) == ("mep_free", 7, config.hash)
        assert (row["corpus"], row["part"], row["protocol"]) == ("noise", "valid", "equal_tokens")
        assert (row["train_length"], row["tokenizer"], row["seed"]) == (16, "aaaa", 7)
        logged = f"equal_tokens {row['length']}: perplexity {row['perplexity']:.2f}, "
        assert sum(message.startswith(logged) for message in caplog.messages) == 1
    printed = capsys.readouterr().out
    assert printed.split()[:4] == ["pos_emb", "16*", "32", "64"]
    assert "results.jsonl and" in printed
    assert (folder / "new/results.png").read_bytes().startswith(b"\x89PNG")


def test_an_evaluation_repeats_bit_for_bit(folder):
    protocols = "--protocol equal_tokens tail position --tail 8 --windows 3 --stride 16"
    runs = []
    for name in ("first", "second"):
        output = folder / f"{name}.jsonl"
        assert evaluate("--checkpoint", folder / "run", protocols, "--output", output) == 0
        clock = {"seconds": 0.0, "tokens_per_second": 0.0}
        runs.append([row | clock for row in read_results([output])])
    assert len(runs[0]) == 7
    assert runs[0] == runs[1]


@pytest.mark.parametrize(("deterministic", "number"), [("false", 1), ("true", 8)])
def test_the_threads_of_a_deterministic_evaluation_do_not_follow_the_load(
    folder, monkeypatch, deterministic, number
):
    for name in threads.BY_USER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads, "this_machine", lambda: threads.Machine(8, load=7.0))
    monkeypatch.setattr(threads, "PARAMETERS_PER_THREAD", 10)
    chosen = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    assert evaluate(given(folder, "seed=7", f"deterministic={deterministic}")) == 0
    assert chosen == [number]


def test_a_checkpoint_needs_no_configuration_and_its_step_can_be_chosen(folder, capsys):
    assert evaluate("--checkpoint", folder / "run", "--step", 3, "--lengths", 16) == 0
    (row,) = read_results([folder / "run/evaluation/text-valid-global_step3.jsonl"])
    assert (row["step"], row["seed"], row["length"]) == (3, 3, 16)
    own_config = folder / "run/global_step7/config.yml"
    assert evaluate(own_config, "eval_part=test eval_tokens=64 --lengths 32") == 0
    (row,) = read_results([folder / "run/evaluation/text-test-global_step7.jsonl"])
    assert (row["step"], row["part"], row["tokens"]) == (7, "test", 64)


def test_the_protocol_of_the_papers_is_named_in_the_results(folder):
    words = ["--checkpoint", folder / "run", "--protocol paper --windows 5 --lengths 16 32"]
    output = folder / "run/evaluation/text-valid-global_step7-paper.jsonl"
    assert evaluate(*words) == 0
    rows = read_results([output])
    numbers = [(row["protocol"], row["windows"], row["tokens"]) for row in rows]
    assert numbers == [("paper", 5, 80), ("paper", 5, 160)]
    first = {row["text"] for row in rows}
    assert evaluate(*words, "--start 3") == 0
    rows = read_results([output])
    starts = sorted((row["length"], row["start"]) for row in rows)
    assert starts == [(16, 0), (16, 3), (32, 0), (32, 3)]
    assert first < {row["text"] for row in rows}  # other windows replace nothing


def test_no_training_steps_measure_as_kerple_and_mep_do(folder, caplog):
    # As their evaluation files: both parts at seq-length-val, eval-iters batches each.
    file = folder / "eval.yml"
    lines = [f"{key}: {value}" for key, value in (word.split("=") for word in SHAPE + EVALUATION)]
    lines += ["train-iters: 0", "eval-iters: 2", "eval-interval: 2", "seq-length-val: 32"]
    lines += ["train_micro_batch_size_per_gpu: 2", f"load: {folder}/run"]
    file.write_text("\n".join([*lines, f"data-path: {folder}/text"]))
    assert evaluate(file) == 0
    results = folder / "run/evaluation"
    places = {"valid": 3 * 4, "test": 0}  # three validations before step 7, of 4 windows each
    for part, start in places.items():
        (row,) = read_results([results / f"text-{part}-global_step7-paper.jsonl"])
        assert (row["protocol"], row["part"], row["length"]) == ("paper", part, 32)
        assert (row["windows"], row["start"]) == (4, start)
        output = folder / f"{part}.jsonl"
        words = f"--protocol paper --windows 4 --start {start} --lengths 32"
        assert (
            evaluate("--checkpoint", folder / "run", f"eval_part={part}", words, "-o", output) == 0
        )
        (same,) = read_results([output])
        assert (same["text"], same["loss"]) == (row["text"], row["loss"])
    assert "protocol paper, 4 windows of 32 tokens of each part" in caplog.text
    assert evaluate(file, "--lengths 16 --output", folder / "own.jsonl") == 0
    (row,) = read_results([folder / "own.jsonl"])
    assert row["protocol"] == "equal_tokens"


def test_no_training_steps_without_a_checkpoint_or_a_batch_are_an_error(folder, capsys):
    file = folder / "eval.yml"
    lines = [f"{key}: {value}" for key, value in (word.split("=") for word in SHAPE)]
    file.write_text("\n".join([*lines, "train-iters: 0", f"load: {folder}/absent"]))
    assert evaluate(file) == 1
    assert "checkpoint: no folder" in capsys.readouterr().err
    assert evaluate(file, "eval_iters=0") == 1
    assert "eval_iters: 0 batches are nothing to measure" in capsys.readouterr().err


def test_paper_precision_is_a_variant_that_every_row_names(folder, capsys):
    output = folder / "both.jsonl"
    words = "--paper-precision off on --lengths 16 --output"
    assert evaluate("--checkpoint", folder / "run", words, output) == 0
    exact, rounded = read_results([output])
    assert "paper_precision" not in exact
    assert rounded["paper_precision"] is True
    assert 0 < abs(exact["loss"] - rounded["loss"]) < 0.1
    assert "paper_precision on" in capsys.readouterr().out


def test_several_protocols_and_variants_of_one_model_come_from_one_call(folder, capsys):
    protocols = "--protocol equal_tokens tail position --tail 8"
    variants = "--window none train_length --logn-scale off on"
    output = folder / "all.jsonl"
    assert evaluate(given(folder), protocols, variants, "--output", output) == 0
    rows = read_results([output])
    found = {(row["protocol"], row.get("window"), row.get("logn_scale", False)) for row in rows}
    assert len(found) == 3 * 2 * 2
    assert len(rows) == 2 * 2 * (3 + 3 + 1)
    loss = {
        (row["protocol"], row.get("window"), row["length"]): row["loss"]
        for row in rows
        if "logn_scale" not in row
    }
    for protocol in ("equal_tokens", "tail"):
        at_16 = loss[protocol, None, 16] - loss[protocol, "train_length", 16]
        at_64 = loss[protocol, None, 64] - loss[protocol, "train_length", 64]
        assert abs(at_16) < 1e-6 < abs(at_64), "a window matters beyond the training length only"
    prefix = {row["length"]: row["perplexity"] for row in by_length([rows[-1]], [16, 32, 64])}
    assert prefix[64] == pytest.approx(rows[-1]["perplexity"], rel=1e-5)
    printed = capsys.readouterr().out
    assert printed.count("pos_emb") == 3
    assert "mep_free, window 16, logn_scale on" in printed
    assert sorted(path.name for path in folder.glob("all.*png")) == [
        "all.equal_tokens.png",
        "all.position.png",
        "all.tail.png",
    ]
    assert evaluate(given(folder), "--window", "wide") == 1
    assert "--window wide: give a number of tokens" in capsys.readouterr().err


def test_the_variants_of_one_call_are_not_taken_for_each_other(folder):
    words = [given(folder), "--lengths", 64, "--output", folder / "a.jsonl"]
    assert evaluate(*words, "--window", "train_length") == 0
    assert evaluate(*words, "--window", 8, "none", 16) == 0
    rows = {row.get("window"): row for row in read_results([folder / "a.jsonl"])}
    assert set(rows) == {None, 8, "train_length"}, "16 tokens are the length of the training"
    assert len({row["loss"] for row in rows.values()}) == 3


def test_a_file_is_named_by_the_window_as_it_was_asked_for(folder):
    assert evaluate(given(folder), "--lengths", 16, "--window", "none", "train_length", 8) == 0
    names = {path.name for path in (folder / "run/evaluation").glob("*.jsonl")}
    assert names == {
        "text-valid-global_step7.jsonl",
        "text-valid-global_step7-window=train_length.jsonl",
        "text-valid-global_step7-window=8.jsonl",
    }


def test_a_pass_by_position_is_measured_again_for_lengths_that_its_row_has_no_mean_of(
    folder, capsys
):
    words = (given(folder), "--protocol position --output", folder / "a.jsonl", "--lengths 64")
    assert evaluate(*words) == 0
    assert evaluate(*words, 20) == 0
    assert "20 " in capsys.readouterr().out
    (row,) = read_results([folder / "a.jsonl"])
    assert 20 in row["position_edges"]


def test_what_is_there_is_not_measured_again_unless_weights_or_precision_are_others(folder):
    words = (given(folder), "--output", folder / "a.jsonl")
    assert evaluate(*words, "--lengths", 32) == 0
    first = read_results([folder / "a.jsonl"])
    assert evaluate(*words, "--lengths", 16, 32) == 0
    assert read_results([folder / "a.jsonl"])[:1] == first, "with the seconds that it took"
    assert evaluate(*words, "--lengths", 32, "--dtype", "bf16") == 0
    exact, _, half = read_results([folder / "a.jsonl"])
    assert half["dtype"] == "bfloat16"
    assert 1e-6 < abs(half["loss"] - exact["loss"]) < 0.02 * exact["loss"]
    assert half["text"] == exact["text"]
    torch.manual_seed(0)
    save_file(
        model(configuration(folder)).state_dict(), folder / "run/global_step7/model.safetensors"
    )
    assert evaluate(*words, "--lengths", 32) == 0
    assert read_results([folder / "a.jsonl"])[0]["loss"] != exact["loss"]


def test_learned_positions_say_where_they_end_instead_of_a_number(folder, capsys):
    save(folder, 9, "pos_emb=learned")
    assert evaluate("--checkpoint", folder / "run", "--step", 9) == 0
    printed = capsys.readouterr().out
    reason = "pos_emb: learned positions end at 16, so length 32 cannot be computed"
    assert f"learned: n/a at 32, 64: {reason}" in printed
    rows = read_results([folder / "run/evaluation/text-valid-global_step9.jsonl"])
    assert [row["perplexity"] is None for row in rows] == [False, True, True]
    assert [row["tokens"] for row in rows] == [128, 128, 128]


def test_of_load_and_save_the_one_with_a_checkpoint_is_measured(folder, capsys):
    words = ["--lengths", "16", "--output", folder / "results.jsonl"]
    assert evaluate(given(folder), f"load={folder}/nothing-yet", *words) == 0
    assert evaluate(given(folder), f"load={folder}/run", f"save={folder}/nothing-yet", *words) == 0
    assert evaluate(given(folder), f"load={folder}/run/global_step3", *words) == 1
    assert re.search(
        r"load \(.*global_step3\) and save \(.*run\) both hold one - say which",
        capsys.readouterr().err,
    )


def test_both_backends_can_be_asked_for_and_agree(folder):
    found = {}
    for backend in ("eager", "sdpa"):
        output = folder / f"{backend}.jsonl"
        config = given(folder, f"attention_backend={backend}")
        assert evaluate(config, "--lengths 64 --output", output) == 0
        (found[backend],) = read_results([output])
        assert found[backend]["attention_backend"] == backend
    assert found["eager"]["loss"] == pytest.approx(found["sdpa"]["loss"], abs=1e-6)


def test_what_cannot_be_evaluated_is_one_message_and_writes_nothing(folder, capsys):
    with TokenWriter(
        folder / "other", np.uint16, meta={"tokenizer": {**TOKENIZER, "hash": "bbbb"}}
    ) as writer:
        writer.add(np.arange(60))
    (folder / "notes.txt").write_text("my thesis\n")
    own, run_folder = given(folder), f"--checkpoint {folder}/run"
    trained = "is given, the checkpoint was trained with"
    none_named = "give the configuration of a run, or --checkpoint DIR"
    cases = {
        "--output x.jsonl": f"checkpoint: none is named - {none_named}",
        f"--checkpoint {folder}/nowhere": "no folder .*nowhere - train first",
        f"{run_folder} --step 5": "looked for global_step5/checkpoint.json .* steps there: 3, 7",
        f"{own} pos_emb=rotary": f"pos_emb: 'rotary' {trained} 'mep_free'",
        f"{own} num_layers=3": f"num_layers: 3 {trained} 2",
        f"{own} split=9,1,0": f"split: '9,1,0' {trained} '5,4,1'",
        f"{own} data_path={folder}/other": (
            "written by HFTokenizer bbbb .* learned with HFTokenizer aaaa"
        ),
        f"{own} data_path={folder}/none": "there are no token files .*none.bin",
        f"{own} eval_tokens=32": "eval_tokens: 32 is less than one window .* longest length, 64",
        f"{own} eval_tokens=9999 --lengths 16 4096": "the valid part of the .* needs 4096",
        f"{own} --output {folder}/notes.txt": "notes.txt exists and holds something else",
    }
    for words, message in cases.items():
        assert evaluate(words) == 1, words
        text = capsys.readouterr().err
        assert "Traceback" not in text
        assert re.search(message, text), (words, text)
    assert not list(folder.rglob("*.jsonl"))
    assert (folder / "notes.txt").read_text() == "my thesis\n"


def test_a_second_evaluation_into_one_file_is_refused_before_it_measures(folder, capsys):
    output = folder / "a.jsonl"
    words = [given(folder), "--lengths 16", "--output", output]
    with owned_file(output, "--output"):
        assert evaluate(*words) == 1
    message = rf"--output: {output} is in use by process \d+ on .*, end it, or choose another file"
    assert re.search(message, capsys.readouterr().err)
    assert not output.exists()
    assert evaluate(*words, "--protocol tail equal_tokens --tail 8") == 0
    assert not list(folder.glob(".*"))


def test_windows_that_no_call_will_use_are_removed(folder, monkeypatch):
    """Those of other code, and those of a row that a killed call had just written."""
    output = folder / "a.jsonl"
    words = [given(folder), "--lengths 16", "--output", output]
    with monkeypatch.context() as killed:
        killed.setattr(WindowFile, "remove", lambda self: None)
        assert evaluate(*words) == 0
    assert list(folder.glob(".a.jsonl.*.partial"))
    others = ["a.jsonl.000000000000.111111111111.0", "a.jsonl.111111111111.0", "b.jsonl.0"]
    for name in others:
        (folder / f".{name}.partial").touch()
    assert evaluate(*words) == 0
    assert [path.name for path in folder.glob(".*")] == [".b.jsonl.0.partial"]


@pytest.mark.distributed
def test_two_processes_share_the_windows_and_one_batch_or_process_gives_the_same(folder):
    words = ["--lengths", "16", "32", "--windows", "5"]
    words += ["--protocol", "equal_tokens", "sliding", "paper", "--output"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    found = run_script(*launcher, "evaluate.py", given(folder), *words, folder / "two.jsonl")
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("perplexity on noise valid, 128 tokens") == 2
    for size in (16, 64, 128):  # the two processes have batches of 64
        batches = f"eval_batch_tokens={size}"
        assert evaluate(given(folder), batches, *words, folder / f"{size}.jsonl") == 0
    results = [read_results([folder / f"{name}.jsonl"]) for name in ("two", "16", "64", "128")]
    for two, small, same, large in zip(*results, strict=True):
        for one in (small, same, large):
            assert one["loss"] == pytest.approx(two["loss"], abs=1e-5)
            assert one["window_losses"] == pytest.approx(two["window_losses"], abs=1e-5)
            assert one["block_losses"] == pytest.approx(two["block_losses"], abs=1e-5)
            assert one["text"] == two["text"]
        for key in ("loss", "window_losses", "block_losses"):
            assert same[key] == two[key], "the same batches give the same bits"
    assert not list(folder.glob(".*.partial"))


def test_a_row_has_bits_per_byte_where_the_tokenizer_can_count_also_when_it_was_kept(
    folder, capsys
):
    words = ("--checkpoint", folder / "run", "--lengths", "16", "--output", folder / "a.jsonl")
    assert evaluate(*words) == 0
    assert "bits_per_byte" not in read_results([folder / "a.jsonl"])[0]
    hash_of_bytes = build_tokenizer("CharLevelTokenizer").hash
    for file in (folder / "text.json", folder / "run/global_step7/checkpoint.json"):
        file.write_text(file.read_text().replace("aaaa", hash_of_bytes))
    bytes_count = ("tokenizer_type=CharLevelTokenizer", "--output", folder / "b.jsonl")
    assert evaluate(*words[:4], *bytes_count) == 0
    (row,) = read_results([folder / "b.jsonl"])
    assert row["bytes_from"] == "tokenizer"
    assert row["bytes"] <= row["tokens"]
    bits = row["loss"] * row["tokens"] / math.log(2) / row["bytes"]
    assert row["bits_per_byte"] == pytest.approx(bits, rel=1e-12)
    assert f"bits per byte {bits:.4f} at 16 (bytes counted by" in capsys.readouterr().out
    older = {key: row[key] for key in row if not key.startswith(("bytes", "bits"))}
    write_lines(folder / "b.jsonl", [older])
    assert evaluate(*words[:4], *bytes_count) == 0
    assert read_results([folder / "b.jsonl"]) == [row], "kept, with the same seconds"
