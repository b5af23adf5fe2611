"""generate.py on a checkpoint with random weights: prompts from everywhere, text and rows."""

import io
import json
import subprocess
import sys

import pytest
import torch

import generate as command
from megatron.checkpoints.read import load_for_evaluation
from megatron.data.tokenizers.build import build_tokenizer
from megatron.generation.decode import GenerationSettings
from megatron.generation.with_tokenizer import opened_with_tokenizer
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
    first = tokenizer.encode(prompt) or [tokenizer.eod]
    ids = list(first)
    for _ in range(new):
        logits = model(torch.tensor([ids]))[0, -1, : tokenizer.vocab_size]
        token = int(logits.argmax())
        if token == tokenizer.eod:
            break
        ids.append(token)
    return tokenizer.decode(ids[len(first) :])


def test_the_continuation_alone_is_on_standard_output(forks, generate, folder):
    done = generate("--prompt", PROMPT, *GREEDY)
    text = by_hand(folder, PROMPT, 20)
    assert done.stdout == text + "\n"
    assert "tokens/s" in done.stderr
    assert "seed 0" in done.stderr
    stop = text[7:9]
    stopped = generate("--prompt", PROMPT, *GREEDY, "--stop", stop).stdout
    assert stopped == text[: text.index(stop)] + "\n"
    launched = forks.run(
        "deepy.py", "generate.py", "--checkpoint", folder, "--prompt", PROMPT, *GREEDY
    )
    assert launched.stdout == done.stdout, launched.stderr


def test_with_and_without_a_cache_the_text_is_the_same_and_a_seed_repeats_it(generate):
    for words in ((), ("--window", "20", "--sinks", "3"), ("--logn-scale", "on")):
        asked = ("--prompt", PROMPT, "--max-new-tokens", "150", "--seed", "3", *words)
        assert generate(*asked).stdout == generate(*asked, "--no-cache").stdout
    texts = [generate("--prompt", PROMPT, "--seed", seed).stdout for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_prompts_come_from_words_files_and_standard_input(generate, folder, tmp_path):
    (tmp_path / "one.txt").write_text(PROMPT)
    (tmp_path / "many.txt").write_text(f"{PROMPT}\n\nimport torch\n")
    given = [{"prompt": PROMPT}, {"text": "import torch"}, ""]
    (tmp_path / "many.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    expected = generate("--prompt", PROMPT, *GREEDY).stdout
    assert generate("--prompt-file", tmp_path / "one.txt", *GREEDY).stdout == expected

    def lines(name):
        done = generate("--prompts", tmp_path / name, *GREEDY).stdout.splitlines()
        return [json.loads(line) for line in done]

    from_text, from_json = lines("many.txt"), lines("many.jsonl")
    assert from_text[0]["continuation"] + "\n" == expected
    assert [row["prompt"] for row in from_json] == [PROMPT, "import torch", ""]
    assert from_json[:2] == from_text
    # An empty prompt begins a document.
    assert from_json[2]["continuation"] == by_hand(folder, "", 20)
    words = [sys.executable, ROOT / "generate.py", "--checkpoint", folder, *GREEDY]
    sent = subprocess.run(words, input=PROMPT, capture_output=True, text=True, env=unlaunched())
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


def test_nothing_that_exists_is_replaced_and_bad_words_are_one_message(forks, folder, tmp_path):
    essay = tmp_path / "essay.txt"
    essay.write_text("mine")
    refused = {
        ("--prompt-file", essay, "-o", essay): f"--output: {essay} exists - name a new file",
        ("--interactive", "-o", tmp_path / "a"): "--interactive: writes to the terminal; leave",
        ("--prompt-file", tmp_path): "cannot be read as text",
        ("--prompts", ROOT / "docs" / "none.txt"): "cannot be read as text",
        ("--prompt", "a", "--temperature", "-1"): "--temperature -1.0: give 0 for",
    }
    for words, message in refused.items():
        done = forks.run("generate.py", "--checkpoint", folder, *words)
        assert (done.returncode, done.stdout) == (1, "")
        assert message in done.stderr.splitlines()[-1]
    assert essay.read_text() == "mine"


def test_finished_texts_are_written_where_a_fault_ends_the_others(folder, tmp_path, monkeypatch):
    trained, tokenizer = opened_with_tokenizer(None, folder, None)
    settings = GenerationSettings(max_new_tokens=3, past_documents=True, batch=1)
    facts = {"seed": 0, "config_hash": "a", "checkpoint": "b", "step": 5}
    session = command.Session(trained.model, tokenizer, settings, facts)
    asked = (session, ["a", "bb", "ccc"])
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    command.write_rows(*asked, whole)
    decode = command.decode_in_batches

    def stopping(*words):
        for count, texts in enumerate(decode(*words), 1):
            yield texts
            if count == 7:  # in the third text
                raise KeyboardInterrupt

    monkeypatch.setattr(command, "decode_in_batches", stopping)
    with pytest.raises(KeyboardInterrupt):
        command.write_rows(*asked, broken)
    assert broken.read_text().splitlines() == whole.read_text().splitlines()[:2]


def test_lines_that_are_typed_are_continued_in_a_terminal(folder, monkeypatch, capsys):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    shown = Terminal()
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{PROMPT}\n\nimport\n"))
    monkeypatch.setattr(sys, "stdout", shown)
    trained, tokenizer = opened_with_tokenizer(None, folder, None)
    settings = GenerationSettings(temperature=0, max_new_tokens=20)
    facts = {"seed": 0, "config_hash": "a", "checkpoint": "b", "step": 5}
    command.converse(command.Session(trained.model, tokenizer, settings, facts))
    expected = [by_hand(folder, prompt, 20) for prompt in (PROMPT, "import")]
    harmless = [text.translate(command.NOT_FOR_TERMINALS) + "\n" for text in expected]
    assert shown.getvalue() == "".join(harmless)


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
    assert "learned with (HFTokenizer" in gone.stderr
    assert "is not found - give its files" in gone.stderr
    named = asked("tokenizer_type=HFTokenizer", f"vocab_file={moved}")
    assert named.stdout == beside.stdout, named.stderr
