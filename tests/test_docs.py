"""Every command of the guides runs, in a clone, one page after the other, with small sizes."""

import json
import re
import shlex
import shutil
from contextlib import chdir
from pathlib import Path

import pytest
import torch
import zstandard
from tokenizers import ByteLevelBPETokenizer

from megatron.config import load
from megatron.model import from_config
from megatron.report.document import make_clone
from megatron.results.files import read_rows
from megatron.results.papers import published_tables
from megatron.results.table import table
from tests.published import KERPLE, MEP, experiments, write_bases
from tests.support import ROOT, blocks, modules

pytestmark = pytest.mark.docs

DOCS = ROOT / "docs"
# Appended to a command that holds the words, so that it takes seconds: the last word wins.
MODEL = [
    *("num_layers=1", "hidden_size=24", "num_attention_heads=3", "precision=fp32"),
    *("train_iters=2", "lr_decay_iters=2", "train_micro_batch_size_per_gpu=1"),
    *("data_path=data/text/text_text_document", "vocab_file=data/text/tokenizer.json"),
    *("tokenizer_type=HFTokenizer", "split=8,1,1", "eval_interval=0"),
    *("eval_iters=1", "seq_length_val=512"),
]
EVALUATED = ["eval_tokens=4096"]
ONE, TWO = ["train_batch_size=1"], ["train_batch_size=2"]
SMALLER: list[tuple[str, list[str]]] = [
    ("ex_eval.yml", [*MODEL[:4], *MODEL[5:], "seq_length=64", "seq_length_val=128"]),
    ("local_setup.yml", [*MODEL, "seq_length=64", "save_interval=0"]),
    ("sweep.py run docs/tutorial/rehearsal.yml --dry-run", []),
    ("sweep.py run rehearsal.yml", ["--only", "seed=1234", "--jobs", "1"]),
    ("train.py first.yml", ["train_iters=20", "lr_decay_iters=20"]),
    ("graft.yml", ["train_iters=20", "lr_decay_iters=20"]),
    ("train_iters=60000", [*MODEL, *ONE, "train_iters=4", "lr_decay_iters=4"]),
    ("extrapolation_interval", [*MODEL, *ONE, *EVALUATED, "eval_lengths=512,1024"]),
    ("profile=true", [*MODEL, *ONE, "train_iters=4", "lr_decay_iters=4"]),
    ("num_gpus=2", [*MODEL, *TWO, "save=runs/two"]),
    ("evaluate.py --checkpoint runs/mep --protocol", ["--lengths", "256", "512", *EVALUATED]),
    ("evaluate.py --checkpoint runs/rotary", ["--lengths", "512", "1024", *EVALUATED]),
    ("evaluate.py --checkpoint runs/alibi", ["--lengths", "512", "1024", *EVALUATED]),
    ("rnope_swa.yml", [*MODEL, *ONE, "num_layers=4"]),
    ("train.py configs/", [*MODEL, *ONE]),
    ("evaluate.py configs/", [*MODEL, *EVALUATED, "eval_lengths=512,1024"]),
    ("task_args.text=demo/", ["task_args.text=data/text/text_text_document"]),
    ("evaluate.py --checkpoint", ["eval_tokens=65536"]),
    ("--max-new-tokens", ["--max-new-tokens", "20"]),
]
NEEDS_A_NETWORK = {"lambada_openai": "is downloaded once"}  # and what is said without one
LAUNCHED = ("first.yml", "num_gpus")
"""In these commands deepy.py itself is run: it starts a new Python, whose imports take seconds.
With others the script that it would start is run; test_deepy.py is about deepy.py."""
PAGES = (
    *("tutorial", "questions", "coming_from", "generation", "harness", "evaluation"),
    *("layers", "longer_texts", "watching", "explain_config", "published_files"),
    *("from_huggingface", "papers", "positions", "sweeps", "your_own_figure"),
    "../README",
)
FILES = (  # that a page shows
    ("coming_from", "yaml", "neox.yml"),
    ("from_huggingface", "yaml", "graft.yml"),
    ("positions", "python", "frozen.py"),
)
ELSEWHERE = {  # pages whose commands other tests run, and one that holds the page's name
    "add_an_encoding": "tools/test_add_an_encoding.py",
    "data": "data/test_recipes.py",
    "exporting": "interop/test_export.py",
    "first_gpu": "test_gpu_check.py",
    "importing": "interop/test_huggingface.py",
    "parallel": "test_docs.py",
    "recipes": "training/test_recipes.py",
    "tasks": "training/test_task.py",
}


def commands(page: str) -> list[str]:
    """Every command of a page, also those in tables and those that a job script gives to srun.

    Not those in which a word of capitals stands for something.
    """
    lines = [line for block in blocks(f"docs/{page}.md", "sh") for line in block.splitlines()]
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    for row in re.findall(r"^\|.*$", text, re.MULTILINE):
        matches = re.findall(r"`(python [^`]+)`", row)
        lines += [line for line in matches if not re.search(r"\b[A-Z]{3,}\b", line)]
    for block in blocks(f"docs/{page}.md", "bash"):
        assert "srun" not in block or "export MASTER_ADDR=" in block  # a run needs it there
        lines += [line for line in block.splitlines() if line.startswith("srun ")]
    lines = [re.split(" {2,}#| {3,}", line)[0].strip() for line in lines]
    # Those of git and pip need a network.
    return [line for line in lines if line and not line.startswith(("#", "git ", "export PIP_"))]


@pytest.fixture(scope="module")
def clone(tmp_path_factory, forks) -> Path:
    """A clone with data, a small run of configs/mep.yml, and a model of transformers."""
    folder = tmp_path_factory.mktemp("guides")
    make_clone(folder)
    (prepare,) = (command for command in commands("tutorial") if "prepare_data.py" in command)
    succeed(forks, folder, prepare)
    for name in ("mep", "rotary", "alibi"):
        encoding = [] if name == "mep" else [f"pos_emb={name}"]
        places = [f"save=runs/{name}", f"load=runs/{name}"]
        train = "python deepy.py train.py configs/mep.yml"
        succeed(forks, folder, train, [*MODEL, *ONE, *encoding, *places])
    shutil.copytree(folder / "runs/rotary", folder / "runs/mine")
    measure = "python evaluate.py --checkpoint runs/alibi --lengths 64 128"
    succeed(forks, folder, measure, EVALUATED)
    for name in ("A.jsonl", "B.jsonl"):
        shutil.copy(next((folder / "runs/alibi/evaluation").glob("*.jsonl")), folder / name)
    torch.manual_seed(1)
    with chdir(folder):
        exec(blocks("docs/from_huggingface.md", "python")[0])
    swept = folder / "runs/sweeps/mep_small"
    swept.mkdir(parents=True)
    shutil.copy(DOCS / "results/cpu-environment.jsonl", swept / "results.jsonl")
    put_what_readers_have(folder)
    (first,) = (block for block in blocks("docs/tutorial.md", "yaml") if "train_iters" in block)
    (folder / "first.yml").write_text(first)
    rehearsal = (DOCS / "tutorial" / "rehearsal.yml").read_text(encoding="utf-8")
    assert "train_iters: 300\n" in rehearsal
    (folder / "rehearsal.yml").write_text(rehearsal.replace("iters: 300\n", "iters: 20\n"))
    for name, lines in (("kerple_configs", KERPLE), ("mep_configs", MEP)):
        (folder / name / "exp_configs").mkdir(parents=True)
        (folder / name / "lengths").mkdir()
        write_bases(folder / name)
        for file in (folder / name).glob("length_*.yml"):
            file.rename(folder / name / "lengths" / file.name)
        for entry in experiments(lines):
            if entry.seed == 1235 and entry.name.startswith(("kerple_log", "ali_tanh")):
                (folder / name / "exp_configs" / f"{entry.stem}.yml").write_text(entry.text)
    for page, language, name in FILES:
        (folder / name).write_text(blocks(f"docs/{page}.md", language)[0])
    return folder


def put_what_readers_have(folder: Path) -> None:
    """The README's texts, GPT-2's vocabulary and the results of make demo."""
    texts = modules()
    bpe = ByteLevelBPETokenizer()
    special = ["<|endoftext|>"]
    bpe.train_from_iterator(texts, vocab_size=600, show_progress=False, special_tokens=special)
    bpe.save_model(str(folder / "data"), "gpt2")
    lines = "".join(json.dumps({"text": text, "meta": {}}) + "\n" for text in texts)
    (folder / "openwebtext2.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))
    (folder / "demo").mkdir()
    results = (DOCS / "demo.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    for name in ("mep_free", "rotary"):
        named = [line for line in results if f'"{name}"' in line]
        (folder / "demo" / f"{name}.jsonl").write_text("".join(named))


def succeed(forks, folder: Path, command: str, more: list[str] | None = None) -> str:
    words, environment = shlex.split(command), {}
    if words[0] == "srun":
        words = words[1:]
        environment = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    assert words[0] == "python", command
    if words[1] == "deepy.py" and not any(part in command for part in LAUNCHED):
        del words[1]
    if words[1] == "1.5":  # of the MEP fork
        del words[1]
    words = [name for word in words for name in expanded(word, folder)]
    done = forks.run(*words[1:], *(more or []), cwd=folder, env=environment, timeout=300)
    expected = next((message for word, message in NEEDS_A_NETWORK.items() if word in command), None)
    if expected is not None:
        assert done.returncode == 1, command
        assert expected in done.stderr
    else:
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def expanded(word: str, folder: Path) -> list[str]:
    """The files that a pattern names, as a shell has them."""
    if "*" not in word:
        return [word]
    return sorted(str(path.relative_to(folder)) for path in folder.glob(word))


def test_the_commands_of_every_page_are_run_by_a_test():
    for path in DOCS.glob("*.md"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"^    (python|make|torchrun) ", text, flags=re.MULTILINE), path
    with_commands = {path.stem for path in DOCS.glob("*.md") if commands(path.stem)}
    assert with_commands <= {*PAGES, *ELSEWHERE, "performance"}
    for page, file in ELSEWHERE.items():
        assert f"{page}.md" in (ROOT / "tests" / file).read_text(encoding="utf-8"), file


def test_the_figure_from_rows_is_drawn(clone):
    (code,) = blocks("docs/your_own_figure.md", "python")
    with chdir(clone):
        exec(code)
    assert (clone / "context.pdf").read_bytes().startswith(b"%PDF")


def test_every_sweep_and_table_of_the_papers_has_its_row():
    text = (DOCS / "papers.md").read_text(encoding="utf-8")
    sweeps = set(re.findall(r"`S ([a-z][\w.]*)", text)) | {"kerple_one"}
    shipped = {path.stem for path in (ROOT / "configs/sweeps").glob("*.yml")}
    assert sweeps == {name for name in shipped if name.startswith(("kerple", "mep"))}
    assert set(re.findall(r"`R ([a-z][\w.]*)", text)) == set(published_tables())


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_run_in_their_order(page, clone, forks):
    # Rows of the step that another page has measured would be of another model.
    shutil.rmtree(clone / "runs" / "mep" / "evaluation", ignore_errors=True)
    for command in commands(page):
        if command.startswith("make "):
            assert f"\n{command.split()[1]}:" in (ROOT / "Makefile").read_text(), command
            continue
        if "--dry-run" not in command:
            command = command.replace("docs/tutorial/rehearsal.yml", "rehearsal.yml")
        more = next((words for part, words in SMALLER if part in command), [])
        succeed(forks, clone, command, more)


def test_the_rehearsal_of_texts_that_are_shared_runs(clone, forks):
    """The command of docs/parallel.md that is no bash block."""
    (command,) = commands("parallel")
    output = succeed(forks, clone, command, [*MODEL, "num_attention_heads=4"])
    assert "2 rank(s) on cpu" in output


def test_the_readmes_configuration_makes_a_model(tmp_path):
    (settings,) = blocks("README.md", "yaml")
    (tmp_path / "settings.yml").write_text(settings)
    assert from_config(load([ROOT / "configs/demo.yml", tmp_path / "settings.yml"]), 100)


def test_the_readmes_table_is_the_measured_one():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    _, grid, *_ = table(read_rows([DOCS / "demo.jsonl"]), form="markdown").split("\n\n")
    assert grid in readme


def test_the_questions_settings_and_its_two_nodes_are_understood(tmp_path):
    (settings,) = blocks("docs/questions.md", "yaml")
    (tmp_path / "settings.yml").write_text(settings)
    (words,) = re.findall(
        r"mep.yml (.* hostfile=hosts)", "".join(blocks("docs/questions.md", "bash"))
    )
    load([ROOT / "configs/mep.yml", tmp_path / "settings.yml"], words.split()).check_batch(16)


def anchors(text: str) -> set[str]:
    """The names that GitHub gives headings: letters, digits and spaces as hyphens."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", entry.strip().lower()).replace(" ", "-") for entry in headings}


def test_every_link_leads_somewhere():
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")):
        text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            if "://" in link:
                continue
            file, _, place = link.partition("#")
            target = (path.parent / file).resolve() if file else path
            assert target.exists(), f"{path.name}: {link}"
            if place and target.suffix == ".md":
                assert place in anchors(target.read_text(encoding="utf-8")), f"{path.name}: {link}"
