"""generate.py on a checkpoint with random weights: prompts from everywhere, text and rows."""

import json
import os
import pty
import subprocess
import sys

import pytest
import torch

import generate as command
from generate import NOT_FOR_TERMINALS, Model, write_rows
from megatron.checkpoints.read import load_for_evaluation
from megatron.data.tokenizers.build import build_tokenizer
from megatron.generation.opened import opened_with_tokenizer
from megatron.generation.run import Settings, continued
from tests.checkpoints import make_checkpoint
from tests.support import ROOT, unlaunched

PROMPT = "def slopes("
GREEDY = ("--temperature", "0", "--max-new-tokens", "20")


@pytest.fixture(scope="module")
def folder(corpus, tmp_path_factory):
    place = tmp_path_factory.mktemp("generating")
    return make_checkpoint(place, corpus, "pos_emb=kerple_log", "init_method_std=0.2")


@pytest.fixture
def generate(forks, folder):
    def run(*words):
        done = forks.run("generate.py", "--checkpoint", folder, *words)
        assert done.returncode == 0, done.stderr
        return done

    return run


@torch.no_grad()
def by_hand(folder, prompt: str, new: int) -> str:
    """The text of the likeliest tokens, each by a whole pass, up to the end of a document."""
    model, _, _ = load_for_evaluation(folder, None)
    tokenizer = build_tokenizer("CharLevelTokenizer", None, None)
    first = tokenizer.encode(prompt)
    ids = list(first)
    for _ in range(new):
        logits = model(torch.tensor([ids]))[0, -1, : tokenizer.vocab_size]
        token = int(logits.argmax())
        if token == tokenizer.eod:
            break
        ids.append(token)
    return tokenizer.decode(ids[len(first) :])


def test_the_continuation_alone_is_on_standard_output(generate, folder):
    done = generate("--prompt", PROMPT, *GREEDY)
    assert done.stdout == by_hand(folder, PROMPT, 20) + "\n"
    assert "tokens/s" in done.stderr
    assert "step 5" in done.stderr
    assert "seed 0" in done.stderr


@pytest.mark.parametrize(
    "words", [(), ("--window", "20"), ("--window", "20", "--sinks", "3"), ("--logn-scale", "on")]
)
def test_with_and_without_a_cache_the_text_is_the_same(generate, words):
    asked = ("--prompt", PROMPT, "--max-new-tokens", "150", "--seed", "3", *words)
    cached, plain = generate(*asked), generate(*asked, "--no-cache")
    assert cached.stdout == plain.stdout


def test_a_seed_repeats_a_text_and_another_one_does_not(generate):
    texts = [generate("--prompt", PROMPT, "--seed", seed).stdout for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_prompts_come_from_words_files_and_standard_input(generate, folder, tmp_path):
    (tmp_path / "one.txt").write_text(PROMPT)
    (tmp_path / "many.txt").write_text(f"{PROMPT}\n\nimport torch\n")
    rows = [{"prompt": PROMPT}, {"text": "import torch"}, "class A"]
    (tmp_path / "many.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    expected = generate("--prompt", PROMPT, *GREEDY).stdout
    assert generate("--prompt-file", tmp_path / "one.txt", *GREEDY).stdout == expected

    def lines(name):
        done = generate("--prompts", tmp_path / name, *GREEDY).stdout.splitlines()
        return [json.loads(line) for line in done]

    from_text, from_json = lines("many.txt"), lines("many.jsonl")
    assert from_text[0]["continuation"] + "\n" == expected
    assert [row["prompt"] for row in from_text] == [PROMPT, "import torch"]
    assert [row["prompt"] for row in from_json] == [PROMPT, "import torch", "class A"]
    assert from_json[:2] == from_text

    command = [sys.executable, ROOT / "generate.py", "--checkpoint", folder, *GREEDY]
    sent = subprocess.run(command, input=PROMPT, capture_output=True, text=True, env=unlaunched())
    assert sent.stdout == expected, sent.stderr


def test_rows_say_what_was_asked_and_of_which_checkpoint(generate, folder, tmp_path):
    output = tmp_path / "rows.jsonl"
    words = ("--prompt", "a", "--prompt", "class B", "--samples", "2", "--top-k", "5")
    done = generate(*words, "--max-new-tokens", "9", "--window", "20", "-o", output)
    assert done.stdout == ""
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    numbers = [(row["prompt"], row["prompt_number"], row["sample"]) for row in rows]
    assert numbers == [("a", 0, 0), ("a", 0, 1), ("class B", 1, 0), ("class B", 1, 1)]
    for row in rows:
        assert row["checkpoint"] == str(folder / "global_step5")
        assert (row["step"], row["top_k"], row["temperature"], row["window"]) == (5, 5, 1.0, 20)
        assert row["ended"] in ("max_new_tokens", "end_of_document")
        assert row["config_hash"]
    assert rows[0]["continuation"] != rows[1]["continuation"]


def test_nothing_that_exists_is_replaced_and_no_text_is_lost(forks, folder, tmp_path):
    essay = tmp_path / "essay.txt"
    essay.write_text("mine")
    refused = {
        ("--prompt-file", essay, "-o", essay): f"--output: {essay} exists - name a new file",
        ("--prompt", "a", "-o", tmp_path): f"--output: {tmp_path} is a folder",
        ("--prompt", "a", "-o", "/proc/no/a.jsonl"): "--output: /proc/no cannot be made",
        ("--interactive", "-o", tmp_path / "a"): "--interactive: writes to the terminal; leave",
    }
    for words, message in refused.items():
        done = forks.run("generate.py", "--checkpoint", folder, *words)
        assert (done.returncode, done.stdout) == (1, "")
        assert message in done.stderr.splitlines()[-1]
    assert essay.read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--prompt a >&-", "standard output: is closed, and texts would be lost"),
        ("--prompt - <&-", "standard input: is closed"),
        ("--interactive <&-", "standard input: is closed"),
        ("<&-", "--prompt: no prompt is given"),
    ],
)
def test_closed_streams_are_one_message(folder, words, message):
    command = f"{sys.executable} {ROOT / 'generate.py'} --checkpoint {folder} {words}"
    done = subprocess.run(
        command, shell=True, stderr=subprocess.PIPE, text=True, env=unlaunched(), check=False
    )
    assert done.returncode == 1
    assert message in done.stderr.splitlines()[-1]


def test_finished_texts_are_written_where_a_fault_ends_the_others(folder, tmp_path, monkeypatch):
    trained, tokenizer = opened_with_tokenizer(None, folder, None)
    settings = Settings(most=3, past_documents=True, batch=1)
    facts = {"seed": 0, "config_hash": "a", "checkpoint": "b", "step": 5}
    asked = Model(trained, tokenizer, settings, facts)
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    write_rows(asked, ["a", "bb", "ccc"], whole)

    def stopping(*words):
        for count, texts in enumerate(continued(*words), 1):
            yield texts
            if count == 7:  # in the third text
                raise KeyboardInterrupt

    monkeypatch.setattr(command, "continued", stopping)
    with pytest.raises(KeyboardInterrupt):
        write_rows(asked, ["a", "bb", "ccc"], broken)
    assert broken.read_text().splitlines() == whole.read_text().splitlines()[:2]


def test_a_text_of_a_batch_is_the_one_that_it_is_alone(generate):
    alone = generate("--prompt", "a", "--seed", "4").stdout
    rows = generate("--prompt", "a", "--prompt", "another one", "--seed", "4").stdout.splitlines()
    assert json.loads(rows[0])["continuation"] + "\n" == alone


def test_a_stop_string_ends_the_text(generate):
    text = generate("--prompt", PROMPT, *GREEDY).stdout[:-1]
    stop = text[7:9]
    stopped = generate("--prompt", PROMPT, *GREEDY, "--stop", stop).stdout
    assert stopped == text[: text.index(stop)] + "\n"


def test_an_empty_prompt_begins_a_document(generate, folder):
    model, _, _ = load_for_evaluation(folder, None)
    tokenizer = build_tokenizer("CharLevelTokenizer", None, None)
    logits = model(torch.tensor([[tokenizer.eod]]))[0, -1, : tokenizer.vocab_size]
    row = json.loads(
        generate(
            "--prompt", "", "--prompt", "a", *GREEDY[:2], "--max-new-tokens", "1", "--ignore-eod"
        ).stdout.splitlines()[0]
    )
    assert row["continuation"] == tokenizer.decode([int(logits.argmax())])


def test_lines_that_are_typed_are_continued_in_a_terminal(folder):
    ours, theirs = pty.openpty()
    words = ["generate.py", "--checkpoint", folder, "--interactive", *GREEDY]
    process = subprocess.Popen(
        [sys.executable, *map(str, words)],
        cwd=ROOT,
        env=unlaunched() | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=theirs,
        stderr=subprocess.PIPE,
    )
    os.close(theirs)
    _, errors = process.communicate(f"{PROMPT}\n\nimport\n".encode(), timeout=120)
    shown = b""
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:  # how a terminal says that the other side has closed it
            break
        if not piece:
            break
        shown += piece
    os.close(ours)
    assert process.returncode == 0, errors.decode()
    expected = [
        by_hand(folder, prompt, 20).translate(NOT_FOR_TERMINALS) for prompt in (PROMPT, "import")
    ]
    assert shown.decode().replace("\r\n", "\n") == "".join(text + "\n" for text in expected)
    assert errors.decode().count("tokens/s") == 2


def test_deepy_runs_it_as_one_process(forks, folder):
    words = ("--prompt", PROMPT, *GREEDY)
    plain = forks.run("generate.py", "--checkpoint", folder, *words)
    launched = forks.run("deepy.py", "generate.py", "--checkpoint", folder, *words)
    assert launched.returncode == 0, launched.stderr
    assert launched.stdout == plain.stdout


def test_the_tokenizer_is_found_beside_the_data_or_where_it_is_named(forks, tmp_path):
    (tmp_path / "text.txt").write_text((ROOT / "README.md").read_text())
    words = ("--input", tmp_path / "text.txt", "--name", "text", "-t", "HFTokenizer")
    done = forks.run("prepare_data.py", *words, "--vocab-size", "300", "-d", tmp_path / "data")
    assert done.returncode == 0, done.stderr
    place = tmp_path / "data" / "text"
    run = make_checkpoint(tmp_path / "run", place / "text_text_document", "pos_emb=alibi")

    def asked(*more):
        return forks.run("generate.py", "--checkpoint", run, "--prompt", PROMPT, *GREEDY, *more)

    beside = asked()
    assert beside.returncode == 0, beside.stderr

    moved = (place / "tokenizer.json").rename(tmp_path / "moved.json")
    gone = asked()
    assert gone.returncode == 1
    assert "vocab_file: the tokenizer that" in gone.stderr
    assert "learned with (HFTokenizer" in gone.stderr
    assert "is not found - give its files" in gone.stderr
    assert "Traceback" not in gone.stderr

    named = asked("tokenizer_type=HFTokenizer", f"vocab_file={moved}")
    assert named.returncode == 0, named.stderr
    assert named.stdout == beside.stdout
