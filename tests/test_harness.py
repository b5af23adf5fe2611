"""Tasks of lm-evaluation-harness on a checkpoint, beside log-likelihoods by whole passes."""

import importlib
import json
import math
from pathlib import Path

import pytest
import torch

from megatron.checkpoints.read import load_for_evaluation
from megatron.data.tokenizers import build_tokenizer
from megatron.data.tokenizers.tokenizer import description
from megatron.data.tokenizers.train import train_tokenizer
from tests.interop.models import a_run
from tests.support import call

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
pytest.importorskip("accelerate", reason="lm-evaluation-harness needs it for transformers' models")
TEXTS = ["The answer is short and the answer is yes", "Answer the question, and then the answer"]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A checkpoint with a tokenizer, and a data set where the harness looks for LAMBADA."""
    monkeypatch.chdir(tmp_path)
    # One folder of the harness's many, which take it ten seconds to read.
    tasks = importlib.import_module("lm_eval.tasks")
    lambada = Path(tasks.__file__).with_name("lambada")
    manager = tasks.TaskManager(include_path=lambada, include_defaults=False)
    monkeypatch.setattr("lm_eval.evaluator.TaskManager", lambda **_: manager)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    place = tmp_path / "EleutherAI/lambada_openai"
    place.mkdir(parents=True)
    lines = [json.dumps({"text": text}) + "\n" for text in TEXTS]
    (place / "test.jsonl").write_text("".join(lines))
    (tmp_path / "tokenizer.json").write_text(train_tokenizer([" ".join(TEXTS) * 20], 300))
    tokenizer = build_tokenizer("HFTokenizer", tmp_path / "tokenizer.json")
    files = ["tokenizer_type=HFTokenizer", f"vocab_file={tmp_path / 'tokenizer.json'}"]
    about = description(tokenizer)
    folder, _ = a_run(
        tmp_path, "pos_emb=alibi", *files, tokenizer=about, vocab=about["vocab_size"] + 5
    )
    return folder, tokenizer


@torch.no_grad()
def log_likelihood(model, tokenizer, text):
    context, _, word = text.rpartition(" ")
    ids = tokenizer.encode(f"{context} {word}")
    start = len(tokenizer.encode(context))
    logits = model(torch.tensor([ids[:-1]]))[0].double().log_softmax(-1)
    targets = torch.tensor(ids[start:])
    scored = logits[start - 1 :]
    right = bool((scored.argmax(-1) == targets).all())
    return scored.gather(1, targets[:, None]).sum().item(), right


def test_a_task_has_the_log_likelihoods_of_whole_passes_at_each_length(run):
    folder, tokenizer = run
    words = ["--tasks", "lambada_openai", "--num_fewshot", "0", "--lengths", "24", "64"]
    done = call("evaluate.py", "--checkpoint", folder, *words, "-o", "out.jsonl")
    assert done.returncode == 0, done.stderr
    assert "lambada_openai" in done.stdout
    model, _, _ = load_for_evaluation(folder, None)
    results = [log_likelihood(model, tokenizer, text) for text in TEXTS]
    perplexity = math.exp(-sum(nats for nats, _ in results) / len(TEXTS))
    with open("out.jsonl") as file:
        rows = [json.loads(line) for line in file]
    assert [row["length"] for row in rows] == [24, 64]
    for row in rows:
        numbers = row["results"]["lambada_openai"]
        assert numbers["perplexity,none"] == pytest.approx(perplexity, rel=1e-4)
        assert numbers["acc,none"] == sum(right for _, right in results) / len(TEXTS)
        assert row["pos_emb"] == "alibi"


def test_a_task_that_is_unknown_or_has_no_tokenizer_json_is_one_message(run):
    folder, _ = run
    done = call("evaluate.py", "--checkpoint", folder, "--tasks", "lambda_openai")
    assert done.returncode == 1
    assert "lambda_openai" in done.stderr
    assert "Traceback" not in done.stderr
