"""evaluate.py --tasks: task files of a folder, what they give, and what is refused."""

import json
import re
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from megatron.checkpoints.read import load_for_evaluation
from megatron.data.tokenizers.build import build_tokenizer
from megatron.errors import UserError
from megatron.evaluation.perplexity import measured
from megatron.generation.decode import GenerationSettings
from megatron.harness import tasks as asking
from megatron.harness.tasks import existing_rows
from megatron.protocols import Sliding, windows_of
from tests.checkpoints import make_checkpoint
from tests.encodings import every_signature
from tests.generation.test_generate import likeliest
from tests.model.test_cache import model as small_model
from tests.support import ROOT, call

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
from megatron.harness.adapter import Harness, settings_by

TEXT = (ROOT / "megatron" / "errors.py").read_text(encoding="utf-8")
CHOICES = [
    {"question": "def f(x):\n    return", "choices": [" x", " 7q", "\n"], "answer": 0},
    {"question": "import", "choices": [" zzz", " os", " a long one"], "answer": 1},
    {"question": "class A", "choices": [":", "!", "()"], "answer": 2},
    {"question": "x = " + "1 + " * 40, "choices": ["1", "x", ")"], "answer": 0},
]
PAGES = [{"text": TEXT[:300]}, {"text": "import os\n"}, {"text": TEXT[300:333]}]
FORM = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
output_type: {kind}
test_split: test
target_delimiter: ""
metadata: {{version: 1}}
"""
CLOZE = """
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc}]
"""
PAGE = """
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}]
"""
WRITE = """
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n", "e"], max_gen_toks: 9, do_sample: false}
metric_list: [{metric: exact_match}]
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder with three tasks, each of another kind, and their data."""
    folder = tmp_path_factory.mktemp("tasks")
    for file, rows in (("choices.jsonl", CHOICES), ("pages.jsonl", PAGES)):
        (folder / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, file, kind, rest in (
        ("cloze", "choices.jsonl", "multiple_choice", CLOZE),
        ("page", "pages.jsonl", "loglikelihood_rolling", PAGE),
        ("write", "choices.jsonl", "generate_until", WRITE),
    ):
        form = FORM.format(name=name, file=folder / file, kind=kind)
        (folder / f"{name}.yaml").write_text(form + rest)
    return folder


@pytest.fixture(scope="module")
def folder(corpus, tmp_path_factory):
    place = tmp_path_factory.mktemp("asked")
    return make_checkpoint(place, corpus, "pos_emb=mep_free", "init_method_std=0.2")


@pytest.fixture(scope="module")
def opened(folder):
    model, _, _ = load_for_evaluation(folder, None)
    return model, build_tokenizer("CharLevelTokenizer", None, None)


def requests(*arguments):
    return [SimpleNamespace(args=args) for args in arguments]


@torch.no_grad()
def log_p(model, tokens):
    """Log-probabilities of the tokens behind the first one, by a whole pass in float64."""
    logits = model(torch.tensor([tokens[:-1]]))[0].double()
    return -cross_entropy(logits, torch.tensor(tokens[1:]), reduction="none")


def test_a_continuation_behind_a_long_text_is_scored_with_the_last_tokens_of_it(opened, caplog):
    model, tokenizer = opened
    text, continuation = TEXT[:200].rstrip(), " and more"
    harness = Harness(model, tokenizer, 64, 64)
    ((log_likelihood, _),) = harness.loglikelihood(requests((text, continuation)))
    tokens = tokenizer.encode(text + continuation)
    expected = log_p(model, tokens[-65:])[-len(tokenizer.encode(continuation)) :].sum()
    assert log_likelihood == pytest.approx(expected.item(), abs=1e-4)
    read = len(tokens) - 1  # the last token is only predicted
    assert f"1 of 1 texts are longer than 64 tokens, up to {read}: they lost" in caplog.text


@pytest.mark.parametrize(("length", "stride"), [(64, 64), (64, 1), (48, 16), (200, 100)])
def test_rolling_is_our_sliding_protocol_on_the_same_text(opened, length, stride):
    model, tokenizer = opened
    count = length + 3 * stride  # as many targets as whole windows have
    tokens = tokenizer.encode(TEXT)[:count]
    text = tokenizer.decode(tokens)
    region = np.array([tokenizer.eod, *tokens])
    scored_text = SimpleNamespace(cut=partial(windows_of, [(0, region)]))
    windows = Sliding(stride).windows_at(scored_text, length)
    ours = measured(model, windows)
    harness = Harness(model, tokenizer, length, stride)
    (log_likelihood,) = harness.loglikelihood_rolling(requests((text,)))
    assert ours["tokens"] == count
    assert -log_likelihood / count == pytest.approx(ours["loss"], abs=1e-4)


@every_signature
@torch.no_grad()
def test_each_text_has_the_numbers_that_it_has_alone(name):
    gpt = small_model(name)
    texts = []
    for length, count in ((30, 3), (2, 1), (60, 59), (7, 2)):
        texts.append((torch.randint(50, (length,)).tolist(), count))
    greedy = [3, 1, 4]
    for _ in range(5):
        greedy.append(int(gpt(torch.tensor([greedy]))[0, -1].argmax()))
    texts.append((greedy, 5))
    scores = Harness(gpt, None, 64, 64, batch_tokens=100).scored(texts)
    assert [is_greedy for _, is_greedy in scores[2:]] == [False, False, True]
    for (tokens, count), (log_likelihood, _) in zip(texts, scores, strict=True):
        expected = log_p(gpt, tokens)[-count:].sum().item()
        assert log_likelihood == pytest.approx(expected, abs=1e-4)


def test_continuations_end_before_a_string_and_see_the_last_tokens(opened):
    model, tokenizer = opened
    harness = Harness(model, tokenizer, 40, 40)
    kwargs = {"until": ["\n"], "max_gen_toks": 12, "do_sample": False}
    prompts = [TEXT[:100], "import", TEXT[50:60]]
    continuations = harness.generate_until(requests(*[(prompt, kwargs) for prompt in prompts]))
    for prompt, continuation in zip(prompts, continuations, strict=True):
        text = likeliest(model, tokenizer, list(tokenizer.encode(prompt)[-28:]), 12)
        assert continuation == text.split("\n")[0]


def test_what_a_task_asks_for_in_vain_is_one_message(opened):
    harness = Harness(*opened, 64, 64)
    with pytest.raises(UserError, match="--lengths 64: a task asks for 64 new tokens"):
        harness.generate_until(requests(("a", {"max_gen_toks": 64})))
    with pytest.raises(UserError, match="--lengths 64: a task scores 90 tokens at once"):
        harness.loglikelihood(requests(("a", "b" * 90)))
    for kwargs, message in (
        ({"num_beams": 4}, " name num_beams, which is not offered - leave it out; known are do_"),
        ({"max_gen_toks": "many"}, " hold what is not a number (invalid literal for int() with"),
        ({"do_sample": True, "top_k": 0}, ": --top-k 0: give a number of 1 to"),
    ):
        with pytest.raises(UserError) as fault:
            settings_by(kwargs)
        assert str(fault.value).startswith(f"--tasks: generation_kwargs of a task{message}")


def test_settings_have_the_names_that_other_libraries_give_them():
    greedy = settings_by({"until": ["Q:", "", None], "max_new_tokens": 5, "temperature": 0})
    assert greedy == GenerationSettings(max_new_tokens=5, stops=("Q:",), temperature=0)
    drawing = settings_by({"do_sample": True, "temperature": "0.5", "top_k": 3, "top_p": 0.9})
    assert drawing == GenerationSettings(max_new_tokens=256, temperature=0.5, top_k=3, top_p=0.9)


# --- the command ---


def ask(folder, tasks, *words):
    task_words = ("--task-folder", tasks, "--tasks", *words)
    done = call("evaluate.py", "--checkpoint", folder, *task_words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_tasks_have_rows_with_what_a_reader_must_know(folder, opened, tasks, tmp_path):
    output = tmp_path / "rows.jsonl"
    done = ask(folder, tasks, "cloze", "page", "write", "--lengths", "48", "64", "-o", output)
    rows = {(row["task"], row["length"]): row for row in existing_rows(output)}
    assert rows.keys() == {(task, n) for task in ("cloze", "page", "write") for n in (48, 64)}
    model, tokenizer = opened
    correct = 0
    for row in CHOICES:
        context = tokenizer.encode(row["question"])
        sums = []
        for choice in row["choices"]:
            # A space at the end of a context is scored with the continuation.
            spaces = len(row["question"]) - len(row["question"].rstrip())
            scored = len(tokenizer.encode(choice)) + spaces
            tokens = (context + tokenizer.encode(choice))[-65:]
            sums.append(log_p(model, tokens)[-scored:].sum().item())
        correct += int(np.argmax(sums)) == row["answer"]
    assert rows["cloze", 64]["value"] == correct / 4
    assert rows["page", 48]["value"] != rows["page", 64]["value"]
    row = rows["write", 64]
    expected = {"pos_emb": "mep_free", "step": 5, "shots": 0, "documents": 4, "protocol": "tasks"}
    assert expected.items() <= row.items()
    assert row["config_hash"]
    assert row["harness"]
    assert re.search(r"page +bits_per_byte +none +0 +3 +48 +\d", done.stdout)


def test_only_the_row_of_the_same_question_is_replaced(folder, tasks, tmp_path):
    output = tmp_path / "rows.jsonl"
    ask(folder, tasks, "cloze", "-o", output)
    ask(folder, tasks, "cloze", "--window", "8", "none", "-o", output)
    rows = existing_rows(output)
    assert [row.get("window") for row in rows] == [None, 8]
    method = ("--limit", "2", "--method", "lm_infinite,sinks=2", "--lengths", "32")
    ask(folder, tasks, "cloze", *method, "-o", output)
    rows = existing_rows(output)
    assert [row["documents"] for row in rows] == [4, 4, 2]
    # A method's defaults are those of the training at every length: it was 64.
    assert rows[-1]["method"] == "lm_infinite,window=64,sinks=2,limit=64"


def test_what_cannot_be_asked_is_one_message(folder, tasks, tmp_path, monkeypatch):
    form = FORM.format(name="gone", file=tmp_path / "gone.jsonl", kind="multiple_choice")
    (tmp_path / "gone.yaml").write_text(form + CLOZE)
    ours = ("--task-folder", tasks)
    for words, message in (
        (["clozze", *ours], "--tasks: no task is called clozze - did you mean cloze?"),
        (["gone", "--task-folder", tmp_path], "--tasks: gone cannot be loaded ("),
        (["cloze", *ours, "--shots", "9"], "cloze failed (ValueError: Sample larger than popul"),
        (["cloze", "--task-folder", "nowhere"], "--task-folder: nowhere is not a"),
        (["cloze", "--protocol", "tail"], "--protocol: tasks have protocols of their"),
        (["cloze", *ours, "--stride", "99"], "--stride 99: must be 1 to 64"),
    ):
        done = call("evaluate.py", "--checkpoint", folder, "--tasks", *words)
        assert done.returncode == 1, done.stdout + done.stderr
        assert message in done.stderr
    monkeypatch.setattr(asking, "PACKAGE", "no_such_package")
    with pytest.raises(UserError, match=r"is not installed - pip install 'lm-eval>=0.4.13,<0.5'"):
        asking.evaluate_tasks(None, asking.Tasks(["cloze"]), asking.Options("nowhere"))
