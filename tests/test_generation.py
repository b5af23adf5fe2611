"""generate.py on a checkpoint with random weights: prompts from everywhere, text and rows."""

import json
from io import BytesIO, TextIOWrapper

import pytest
import torch

from megatron.checkpoints.read import load_for_evaluation
from megatron.data.tokenizers.build import build_tokenizer
from megatron.evaluation import loaded_run
from tests.checkpoints import make_checkpoint
from tests.support import ROOT, call

PROMPT = "def slopes("
GREEDY = ("--temperature", "0", "--max-new-tokens", "20")


@pytest.fixture(scope="module")
def folder(corpus, tmp_path_factory):
    place = tmp_path_factory.mktemp("generating")
    return make_checkpoint(place, corpus, "pos_emb=kerple_log", "init_method_std=0.2")


@pytest.fixture
def generate(folder):
    def run(*words):
        done = call("generate.py", "--checkpoint", folder, *words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@torch.no_grad()
def likeliest(folder, prompt, new=20):
    """The text of the likeliest tokens, each by a whole pass, up to the end of a document."""
    model, _, _ = load_for_evaluation(folder, None)
    tokenizer = build_tokenizer("CharLevelTokenizer")
    ids, written = tokenizer.encode(prompt) or [tokenizer.eod], []
    for _ in range(new):
        logits = model(torch.tensor([ids + written]))[0, -1, : tokenizer.vocab_size]
        token = int(logits.argmax())
        if token == tokenizer.eod:
            break
        written.append(token)
    return tokenizer.decode(written)


def test_the_likeliest_text_alone_is_on_standard_output(generate, folder):
    text = likeliest(folder, PROMPT)
    assert generate("--prompt", PROMPT, *GREEDY) == text + "\n"
    texts = [generate("--prompt", PROMPT, "--seed", seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_prompts_come_from_words_a_file_and_standard_input(generate, folder, tmp_path, monkeypatch):
    (tmp_path / "many.txt").write_text(f"\ufeff{PROMPT}\n\nimport torch\r\n")
    many = ("--prompt", "", "--prompts", tmp_path / "many.txt", *GREEDY)
    rows = [json.loads(line) for line in generate(*many).splitlines()]
    assert [row["prompt"] for row in rows] == ["", PROMPT, "import torch"]
    # An empty prompt begins a document.
    for row in rows:
        assert row["continuation"] == likeliest(folder, row["prompt"])
    sent = TextIOWrapper(BytesIO(("\ufeff" + PROMPT).encode()), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", sent)
    assert generate(*GREEDY) == likeliest(folder, PROMPT) + "\n"


def test_rows_say_what_was_asked_and_of_which_checkpoint(generate, folder, tmp_path):
    output = tmp_path / "rows.jsonl"
    words = ("--prompt", "a", "--prompt", "class B", "--samples", "2", "--top-k", "5")
    assert generate(*words, "--max-new-tokens", "9", "--window", "20", "-o", output) == ""
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    numbers = [(row["prompt"], row["prompt_number"], row["sample"]) for row in rows]
    assert numbers == [("a", 0, 0), ("a", 0, 1), ("class B", 1, 0), ("class B", 1, 1)]
    for row in rows:
        assert row["checkpoint"] == str(folder / "global_step5")
        assert (row["step"], row["top_k"], row["temperature"], row["window"]) == (5, 5, 1.0, 20)
        assert row["config_hash"]
    assert rows[0]["continuation"] != rows[1]["continuation"]


def test_a_setting_that_transformers_refuses_is_one_message(folder):
    done = call("generate.py", "--checkpoint", folder, "--prompt", "a", "--temperature", "-1")
    assert done.returncode == 1
    assert "temperature" in done.stderr


def test_the_tokenizer_is_found_beside_the_data_or_where_it_is_named(tmp_path):
    (tmp_path / "text.txt").write_text((ROOT / "README.md").read_text())
    words = ("--input", tmp_path / "text.txt", "--name", "text", "-t", "HFTokenizer")
    done = call("prepare_data.py", *words, "--vocab-size", "300", "-d", tmp_path / "data")
    assert done.returncode == 0, done.stderr
    place = tmp_path / "data" / "text"
    run = make_checkpoint(tmp_path / "run", place / "text_text_document", "pos_emb=alibi")

    def asked(*more):
        return call("generate.py", "--checkpoint", run, "--prompt", PROMPT, *GREEDY, *more)

    beside = asked()
    assert beside.returncode == 0, beside.stderr
    moved = (place / "tokenizer.json").rename(tmp_path / "moved.json")
    loaded_run._tokenizer.cache_clear()  # as another process would begin
    gone = asked()
    assert gone.returncode == 1
    assert "(HFTokenizer" in gone.stderr
    assert "cannot find the tokenizer" in gone.stderr
    named = asked("tokenizer_type=HFTokenizer", f"vocab_file={moved}")
    assert named.stdout == beside.stdout, named.stderr
