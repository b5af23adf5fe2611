"""The text of configs/README.md, which `make docs` writes."""

import re
import typing
from typing import Any

from megatron.config.legacy import NO_EFFECT, OFF, OPTIONS, RENAMED, SPELLINGS
from megatron.config.schema import SECTIONS, Key, all_keys, default_of, plain
from megatron.files import ROOT
from megatron.strict_yaml import on_one_line

README = ROOT / "configs" / "README.md"
INTRODUCTION = """\
# Configuration

`make docs` generates this page from `megatron/config/schema.py`; edit that file.
`python tools/explain_config.py FILE…` shows the full description of each key.

A configuration is flat YAML with GPT-NeoX's key names; `-` and `_` are the same.
Give several files, and `key=value` words on the command line:

    python deepy.py train.py configs/125M.yml configs/data/pure_python.yml \\
        configs/pos_emb/alibi.yml save=runs/alibi seed=1235 optimizer.params.lr=3e-4

* Files merge from left to right and a later one wins; `key=value` wins over all files.
  The suffix `.yml` may be left out; `-d configs` names the folder of all files.
* A later file replaces a whole key, even if its value is a mapping such as `optimizer`.
  A word with dots changes one entry of a mapping.
* `pos_emb` and `pos_emb_args` belong together: another encoding drops the earlier options.
* All faults are reported together, before anything starts.
* Relative paths start from the current folder; `~` and `$NAME` are expanded as in a shell.

The twelve keys that you need first:

| key | example |
|---|---|
| `num_layers` `hidden_size` `num_attention_heads` | `12` `768` `12` |
| `seq_length` | `512` |
| `pos_emb` | `alibi` |
| `data_path` `vocab_file` | as `prepare_data.py` prints them |
| `train_iters` `train_micro_batch_size_per_gpu` | `10000` `32` |
| `optimizer.params.lr` | `6.0e-4` |
| `save` `load` | the same folder, so that the same command continues the run |

| files | content |
|---|---|
| `125M.yml` `350M.yml` | a model's shape and the papers' recipe, without data and encoding |
| `mep.yml` | everything for one run of MEP: shape, recipe, data and encoding |
| `demo.yml` | the small run of `make demo` |
| `pos_emb/*.yml` | one encoding each, with its options |
| `data/*.yml` | one corpus each, with its tokenizer |
| `recipes/*.yml` | continue to train a checkpoint (`load`); they fit any model (docs/recipes.md) |
"""


def readme() -> str:
    """The text of configs/README.md: each key with its default, first sentence and choices."""
    lines = [INTRODUCTION]
    for name, section in SECTIONS.items():
        lines += [f"## {name}\n", f"{one_line(section.__doc__)}\n"]
        lines += ["| key | default | |", "|---|---|---|"]
        for key in all_keys():
            if key.section != name:
                continue
            default = key.follows or "required"
            if not key.follows and not key.info.is_required():
                default = shown(default_of(key.info))
            meaning = re.split(r"[.;](?: |$)", description(key))[0]
            if values := choices(key.info.annotation):
                meaning = f"{meaning} ({', '.join(map(shown, values))})"
            lines.append(f"| `{key.name}` | {default} | {meaning} |")
        lines.append("")
    lines += ["## Older spellings\n", "| key | here |", "|---|---|"]
    older = {old: f"`{new}`" for old, new in RENAMED.items()}
    older |= {old: f"`pos_emb_args.{option}`" for old, option in OPTIONS.items()}
    older |= SPELLINGS["explained"]
    lines += [f"| `{key}` | {meaning} |" for key, meaning in older.items()]
    for heading, reasons in (("must be off", OFF), ("accepted, has no effect here", NO_EFFECT)):
        names = ", ".join(f"`{key}`" for key in reasons)
        lines.append(f"\n{heading}: {names}")
    return "\n".join(lines) + "\n"


def description(key: Key) -> str:
    """The meaning of a key, on one line."""
    return one_line(key.info.description)


def one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def choices(annotation: Any) -> list[Any]:
    """The words that a type allows; empty for numbers and texts."""
    inner = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        return list(inner)
    return [word for part in inner for word in choices(part)]


def shown(value: Any) -> str:
    """A value in YAML's spelling, and `unset` for null."""
    return "unset" if value is None else on_one_line(plain(value))
