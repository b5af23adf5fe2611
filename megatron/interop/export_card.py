"""The model card of an exported model: README.md with what is known of it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.config import Config
from megatron.interop.exported_folder import ARCHITECTURE
from megatron.positions.layers import name_of_layers
from megatron.results.files import read_results
from megatron.results.table import table

HEAD = """---
library_name: transformers
pipeline_tag: text-generation
license: unknown
tags: [positional-encoding, length-extrapolation]
---
"""
OWN_CLASS = """
The class comes with the model, because no class of transformers has this encoding: read the Python
files in this folder, then load with `trust_remote_code=True`. They need torch and transformers 5
(from 5.17), and nothing else. Texts may be longer than those of the training, with and without a
cache. Batches may be padded, unless the encoding depends on a token's number in the text.
"""


def card(
    architecture: str,
    name: str,
    config: Config,
    record: Mapping[str, Any],
    dtype: str,
    notes: Sequence[str],
    results: Sequence[Path],
) -> str:
    """The text of README.md.

    architecture: class of transformers or ours; name: of the folder; record: checkpoint.json with
    `path`; notes: sentences for the reader; results: files of evaluations, besides those of the run
    UserError for a file of results that cannot be read.
    """
    is_own = architecture == ARCHITECTURE
    encoding = name_of_layers(config.position)
    trust = ", trust_remote_code=True" if is_own else ""
    parts = [
        f"{HEAD}\n# {name}\n",
        f"A language model with the positional encoding `{encoding}`, trained on"
        f" {config.model.seq_length} tokens.\n",
        f"```python\n{_example(name, trust)}\n```",
        OWN_CLASS if is_own else "",
        *(f"{note}\n" for note in notes),
        "## Training\n",
        _listed(_facts(architecture, config, record, dtype)),
        "\n## Evaluation\n",
        _evaluation(record, results),
    ]
    return "\n".join(parts) + "\n"


def _example(name: str, trust: str) -> str:
    """How to load the model; transformers asks for `trust` where it reads config.json alone."""
    return (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("{name}"{trust})\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{name}"{trust})  # where there is one'
    )


def _facts(
    architecture: str, config: Config, record: Mapping[str, Any], dtype: str
) -> dict[str, Any]:
    model = config.model
    tokenizer = record.get("tokenizer") or {}
    facts = {
        "class": architecture,
        "encoding": name_of_layers(config.position),
        "options of the encoding": config.flat()["pos_emb_args"] or None,
        "training length": model.seq_length,
        "layers": model.num_layers,
        "hidden size": model.hidden_size,
        "heads": model.num_attention_heads,
        "vocabulary": record["vocab"],
        "tokenizer": " ".join(str(tokenizer.get(key, "")) for key in ("type", "hash")).strip(),
        "corpus": record.get("corpus"),
        "step": record["step"],
        "steps planned": config.training.train_iters or None,
        "windows in a step": record.get("windows_per_step"),
        "documents": _documents(config),
        "precision of the training": config.precision.precision,
        "dtype of the matrices": dtype,
        "seed": config.training.seed,
        "config hash": record["config_hash"],
        "commit": record.get("commit"),
        "origin": _origin(record),
        "parent": _parent(record),
        "licence of the weights": "unknown",
    }
    return {name: value for name, value in facts.items() if value not in (None, "")}


def _documents(config: Config) -> str | None:
    """What the exported model cannot say itself: it computes a text as one document."""
    if not config.attention.reset_attention_mask:
        return None
    positions = ""
    if config.attention.reset_position_ids:
        positions = ", whose positions began again"
    return (
        f"in training, tokens attended to their own document alone{positions}; this model takes"
        " each text as one document"
    )


def _origin(record: Mapping[str, Any]) -> str | None:
    """What was imported, without the folders of this machine."""
    origin = record.get("origin")
    if not origin:
        return None
    source = str(origin.get("source"))
    name = Path(source).name if Path(source).is_absolute() else source
    return f"{name} ({origin.get('architecture') or origin.get('kind')})"


def _parent(record: Mapping[str, Any]) -> str | None:
    """What was fine-tuned, without its folder."""
    parent = record.get("parent")
    if not parent:
        return None
    described = record.get("parent_model") or f"step {parent['step']}"
    return f"{described}, config {parent['config_hash']}, weights {parent['weights']}"


def _listed(facts: Mapping[str, Any]) -> str:
    lines = ["| | |", "|---|---|"]
    for name, value in facts.items():
        text = str(value).replace("|", "\\|").replace("\n", " ")
        lines.append(f"| {name} | {text} |")
    return "\n".join(lines)


def _evaluation(record: Mapping[str, Any], results: Sequence[Path]) -> str:
    """Perplexity by length, from the results beside the checkpoint and those that are named."""
    files = sorted((Path(record["path"]).parent / "evaluation").glob("*.jsonl"))
    beside = [file for file in files if not file.name.endswith("-probes.jsonl")]
    wanted = (record["config_hash"], record["step"])
    rows = read_results([*beside, *results])
    rows = [row for row in rows if (row["config_hash"], row["step"]) == wanted]
    if not rows:
        return "Not measured yet."
    settings = sorted({(str(row.get("corpus")), str(row.get("protocol"))) for row in rows})
    described = "; ".join(f"{corpus}, protocol {protocol}" for corpus, protocol in settings)
    title = f"Perplexity by length of the text ({described}). \\* is the training length."
    return f"{title}\n\n{table(rows, markdown=True)}"
