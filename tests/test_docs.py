"""Every command of the guides runs, in a clone, one page after the other, with small sizes."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from megatron.commands.document_commands import make_clone
from tests.support import ROOT

DOCS = ROOT / "docs"
# Appended to a command that holds the words, so that it takes seconds: the last word wins.
MODEL = [
    *("num_layers=1", "hidden_size=24", "num_attention_heads=12", "precision=fp32"),
    *("train_iters=2", "lr_decay_iters=2", "train_micro_batch_size_per_gpu=1"),
    *("data_path=data/text/text_text_document", "vocab_file=data/text/tokenizer.json"),
    *("tokenizer_type=HFTokenizer", "split=8,1,1", "eval_interval=0"),
]
ONE, TWO = ["train_batch_size=1"], ["train_batch_size=2"]
SMALLER: list[tuple[str, list[str]]] = [
    ("sweep.py run docs/tutorial/rehearsal.yml --dry-run", []),
    ("sweep.py run docs/tutorial/rehearsal.yml", ["--only", "seed=1234", "--jobs", "1"]),
    ("train.py first.yml", ["train_iters=20", "lr_decay_iters=20"]),
    ("train_iters=60000", [*MODEL, *ONE, "train_iters=4", "lr_decay_iters=4"]),
    ("num_gpus=2", [*MODEL, *TWO, "save=runs/two"]),
    ("train.py configs/mep.yml", [*MODEL, *ONE]),
    ("evaluate.py --checkpoint runs/mep --protocol", ["eval_tokens=4096", "eval_lengths=64,128"]),
    ("--tasks cloze", []),
    ("evaluate.py --checkpoint", ["eval_tokens=65536"]),
    ("--max-new-tokens", ["--max-new-tokens", "20"]),
]
NEEDS_A_NETWORK = {"lambada_openai": "cannot be loaded"}  # words, and what is said without one
PAGES = ("tutorial", "questions", "generation", "harness", "watching")


def blocks(page: str, language: str) -> list[str]:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def commands(page: str) -> list[str]:
    """Every command of a page, also those that a job script gives to srun."""
    lines = [line for block in blocks(page, "sh") for line in block.splitlines()]
    for block in blocks(page, "bash"):
        lines += [line for line in block.splitlines() if line.startswith("srun ")]
    return [line for line in lines if line and not line.startswith("#")]


@pytest.fixture(scope="module")
def clone(tmp_path_factory, forks) -> Path:
    """A clone with data, a small run of configs/mep.yml, and a model of transformers."""
    folder = tmp_path_factory.mktemp("guides")
    make_clone(folder)
    (prepare,) = (command for command in commands("tutorial") if "prepare_data.py" in command)
    succeed(forks, folder, prepare)
    succeed(forks, folder, "python deepy.py train.py configs/mep.yml", [*MODEL, *ONE])
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = GPTNeoXConfig(vocab_size=512, intermediate_size=64, **sizes)
    torch.manual_seed(1)
    GPTNeoXForCausalLM(config).save_pretrained(folder / "models" / "pythia")
    tokenizer = (folder / "data" / "text" / "tokenizer.json").read_text()
    (folder / "models" / "pythia" / "tokenizer.json").write_text(tokenizer)
    (folder / "tasks").mkdir()
    (task,), (rows,) = blocks("harness", "yaml"), blocks("harness", "json")
    (folder / "tasks" / "cloze.yaml").write_text(task)
    (folder / "tasks" / "cloze.jsonl").write_text(rows)
    (first,) = (block for block in blocks("tutorial", "yaml") if "train_iters" in block)
    (folder / "first.yml").write_text(first)
    return folder


def succeed(forks, folder: Path, command: str, more: list[str] | None = None) -> str:
    words, environment = shlex.split(command), {}
    if words[0] == "srun":
        words = words[1:]
        environment = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}
    assert words[0] == "python", command
    done = forks.run(*words[1:], *(more or []), cwd=folder, env=environment, timeout=300)
    expected = next((said for word, said in NEEDS_A_NETWORK.items() if word in command), None)
    if expected is not None:
        assert done.returncode == 1, command
        assert expected in done.stderr
    else:
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_run_in_their_order(page, clone, forks):
    ran = commands(page)
    assert len(ran) >= 2
    for command in ran:
        more = next((words for part, words in SMALLER if part in command), [])
        succeed(forks, clone, command, more)


def test_the_tutorials_sweep_has_the_settings_of_its_first_run():
    (first,) = (block for block in blocks("tutorial", "yaml") if "train_iters" in block)
    (grid,) = (block for block in blocks("tutorial", "yaml") if "grid" in block)
    sweep = (DOCS / "tutorial" / "rehearsal.yml").read_text()
    assert grid in sweep
    for line in first.splitlines():
        key = line.partition(":")[0]
        if key not in ("pos_emb", "train_micro_batch_size_per_gpu"):
            assert f"  {line}\n" in sweep, line


# --- ten questions ---

README = (ROOT / "README.md").read_text(encoding="utf-8")
QUESTIONS = {
    "gpu-hours": ["hours of one H100", "kerple_table3"],
    "attention backend": ["attention_backend"],
    "resume": ["load=runs/mep"],
    "32768": ["--lengths 512 32768"],
    "more steps": ["train_iters=60000"],
    "another length": ["seq_length=1024"],
    "another encoding": ["pos_emb=kerple_log"],
    "slurm": ["num_gpus=2", "srun", "--launcher slurm"],
    "hugging face": ["import_checkpoint.py", "export_checkpoint.py"],
    "cite": ["CITATION.cff"],
}


def anchor(heading: str) -> str:
    """The name that GitHub gives a heading: [letters, digits and spaces as hyphens]."""
    kept = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return kept.replace(" ", "-")


def test_each_question_is_one_click_from_the_readme():
    text = (DOCS / "questions.md").read_text(encoding="utf-8")
    found = re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", text, flags=re.DOTALL | re.MULTILINE)
    sections = dict(found)
    assert len(sections) == len(QUESTIONS) == 10
    for words, body in zip(QUESTIONS.values(), sections.values(), strict=True):
        assert all(word in body for word in words), words
    for heading in sections:
        assert f"docs/questions.md#{anchor(heading)}" in README, heading


def links(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]


GUIDES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(path):
    for link in links(path):
        file, _, place = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), f"{path.name}: {link}"
        if place and target.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.M)
            assert place in {anchor(heading) for heading in headings}, f"{path.name}: {link}"
