"""Recipes of docs/harness.md: task files of the harness and ours, on small data of their form."""

import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
import yaml

from megatron.checkpoints.read import load_for_evaluation
from megatron.harness.tasks import existing_rows
from tests.checkpoints import make_checkpoint
from tests.support import ROOT, call

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
import lm_eval

from megatron.harness.adapter import Harness

TASKS = Path(lm_eval.__file__).parent / "tasks"
RECIPES = yaml.safe_load(Path(__file__).with_name("recipes.yml").read_text(encoding="utf-8"))
REFUSED = RECIPES.pop("refused")


@pytest.fixture(scope="module")
def folder(corpus, tmp_path_factory):
    """A checkpoint of random weights whose tokens are bytes."""
    return make_checkpoint(tmp_path_factory.mktemp("recipes"), corpus, "init_method_std=0.2")


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    """An empty folder, where the package wonderwords is looked for first."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wonderwords", raising=False)
    monkeypatch.setattr("nltk.data.find", lambda name: name)


def ask(folder, place, task, words):
    place = ROOT / place if place == "configs/tasks" else TASKS / place
    task_words = ("--task-folder", place, "--tasks", task, "-o", "rows.jsonl")
    return call("evaluate.py", "--checkpoint", folder, *task_words, *shlex.split(words))


def scored(task, folder):
    """The row of a recipe on its small data."""
    recipe = RECIPES[task]
    for name, text in recipe["files"].items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    done = ask(folder, recipe["place"], task, recipe["words"])
    assert done.returncode == 0, done.stderr
    (row,) = existing_rows(Path("rows.jsonl"))
    return row


@pytest.mark.parametrize("task", sorted(RECIPES.keys() - {"longbench2_table"}))
def test_a_recipe_scores_what_follows_the_prompt(task, folder, monkeypatch):
    recipe = RECIPES[task]
    prompts = []
    generate_until = Harness.generate_until

    def one_right_answer(self, requests):
        written = generate_until(self, requests)
        prompts.extend(request.args[0] for request in requests)
        return [f" {re.search(recipe['answer'], prompts[0])[1]}\n", *written[1:]]

    monkeypatch.setattr(Harness, "generate_until", one_right_answer)
    row = scored(task, folder)
    assert (row["metric"], row["value"], row["documents"]) == (recipe["metric"], 0.5, 2)
    for prompt in prompts:
        assert prompt.startswith(recipe["starts"])
        assert prompt.endswith(recipe["ends"])
        if recipe["place"] == "ruler":  # 128 bytes are left; five more sentences do not fit
            assert 1400 - 128 - 5 * 91 < prompt.index(" The special") <= 1400 - 128


@torch.no_grad()
def test_longbench2_chooses_the_likeliest_letter_behind_the_end_of_the_text(folder):
    model, _, _ = load_for_evaluation(folder, None)
    right = 0
    for number, question in enumerate(RECIPES["longbench2_table"]["questions"]):
        text = f"to this question: {question}\nChoices:\n(A) w\n(B) x\n(C) y\n(D) z\n\nAnswer: "
        after = model(torch.tensor([list(text.encode())[-64:]]))[0, -1]
        right += int(after[list(b"ABCD")].argmax()) == number
    row = scored("longbench2_table", folder)
    assert (row["metric"], row["value"]) == ("acc", right / 4)


@pytest.mark.parametrize(("task", "words", "message"), REFUSED)
def test_what_a_recipe_lacks_is_one_message(task, words, message, folder):
    Path("wonderwords.py").write_text("raise ModuleNotFoundError('wonderwords')")
    done = ask(folder, "ruler", task, words)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
