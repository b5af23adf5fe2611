"""Perplexity of a checkpoint at several lengths, in float32, in one process, on the same text.

python deepy.py evaluate.py configs/mep.yml [--lengths 512 1024] [--output results.jsonl]
python evaluate.py --checkpoint runs/mep [--step 2000]
python evaluate.py --checkpoint runs/mep eval_tokens=65536 eval_part=test
python evaluate.py --checkpoint runs/mine pos_emb_file=my_encoding.py
"""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import torch

from megatron.config import Config
from megatron.data.tokens import TokenFile
from megatron.entry import run
from megatron.errors import UserError
from megatron.evaluation.agreement import check_known_tokens, check_same_model, check_same_tokenizer
from megatron.evaluation.perplexity import Windows, equal_tokens, measurements, paper
from megatron.evaluation.plot import plot_perplexity
from megatron.evaluation.progress import progress
from megatron.evaluation.report import Row, check_output, table, write_results
from megatron.model import GPT
from megatron.training.checkpoint import commit, find, load_for_evaluation


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint", metavar="DIR", help="folder of a run or of one checkpoint; default: load, else save"
    )
    parser.add_argument("--step", type=int, metavar="N", help="which checkpoint of the run; default: the latest")
    parser.add_argument("--lengths", type=int, nargs="+", metavar="L", help="context lengths; default: eval_lengths")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON lines; the plot goes beside it as .png")
    parser.add_argument(
        "--protocol", choices=("equal_tokens", "paper"), default="equal_tokens", help="default: equal_tokens"
    )
    parser.add_argument(
        "--windows", type=int, default=320, metavar="N", help="windows per length of the protocol paper"
    )
    parser.add_argument("--start", type=int, default=0, metavar="N", help="first window of the protocol paper")


def main(config: Config | None, options: argparse.Namespace) -> None:
    model, trained, about = load_for_evaluation(options.checkpoint or folder_of(config, options.step), options.step)
    given = config or trained
    tokens = TokenFile.open(given.data.data_path or trained.data.data_path or "")
    check_same_model(what_must_agree(given, trained), what_must_agree(trained, trained), about["path"])
    check_same_tokenizer(tokens, about.get("tokenizer") or {}, about["path"])
    output = options.output or default_output(Path(about["path"]), tokens, given, options.protocol)
    check_output(output)
    windows = windows_of(tokens, given, trained.training.seed, options)
    check_known_tokens(windows, about["vocab"], about["path"])
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    model.use_attention(given.attention)
    facts = facts_of(model, given, trained, about) | facts_of_text(tokens, given, options.protocol)
    rows: list[Row] = []
    with progress() as advance:
        for one in measurements(model, windows, batch_tokens=given.evaluation.eval_batch_tokens, advance=advance):
            rows.append(facts | dataclasses.asdict(one))
            write_results(output, rows)  # at once: the longest length may be the one that fails
    print(table(rows))
    plot_perplexity(rows, output.with_suffix(".png"), title=f"Perplexity of {facts['pos_emb']} at other lengths")
    print(f"\nwritten to {output} and {output.with_suffix('.png')}")


def folder_of(config: Config | None, step: int | None) -> str:
    """The checkpoint whose own config.yml is given; else load or save, whichever holds one; UserError if two different
    ones do, or none is named."""
    own = Path(config.sources[0]).parent if config and config.sources else None
    if own is not None and step is None and (own / "checkpoint.json").exists():
        return str(own)
    named = [config.checkpoint.load, config.checkpoint.save] if config else []
    folders = list(dict.fromkeys(folder for folder in named if folder))
    if not folders:
        raise UserError("checkpoint: none is named - give the configuration of a run, or --checkpoint DIR")
    if len(folders) == 2 and all(holds_checkpoint(folder, step) for folder in folders):
        raise UserError(
            f"checkpoint: load ({folders[0]}) and save ({folders[1]}) both hold one - say which with --checkpoint"
        )
    return next((folder for folder in folders if holds_checkpoint(folder, step)), folders[0])


def holds_checkpoint(folder: str, step: int | None) -> bool:
    try:
        return find(folder, step).is_dir()
    except UserError:
        return False


def what_must_agree(config: Config, trained: Config) -> dict[str, Any]:
    """Keys that make the model; on the data of the training the split too, or training text would be measured.

    Not the path of pos_emb_file: that its text is the checkpoint's was asked when the checkpoint's config was read.
    """
    paths = [Path(one.data.data_path or trained.data.data_path or "").resolve() for one in (config, trained)]
    split = {"split": config.data.split} if paths[0] == paths[1] else {}
    return config.model_keys() | split


def default_output(checkpoint: Path, tokens: TokenFile, given: Config, protocol: str) -> Path:
    """In the run's folder, by what is measured: another corpus or part replaces nothing."""
    words = [
        tokens.prefix.name,
        given.evaluation.eval_part,
        checkpoint.name,
        *(["paper"] if protocol == "paper" else []),
        *(f"{key}={value}" if value is not True else key for key, value in seen_as(given).items()),
    ]
    return checkpoint.parent / "evaluation" / ("-".join(words) + ".jsonl")


def windows_of(tokens: TokenFile, given: Config, seed: int, options: argparse.Namespace) -> dict[int, Windows]:
    lengths = options.lengths or given.evaluation.eval_lengths
    text = {"split": given.data.split, "part": given.evaluation.eval_part}
    if options.protocol == "paper":
        return paper(tokens, lengths, seed=seed, windows=options.windows, start=options.start, **text)
    return equal_tokens(tokens, lengths, eval_tokens=given.evaluation.eval_tokens, **text)


def facts_of(model: GPT, given: Config, trained: Config, about: dict[str, Any]) -> dict[str, Any]:
    """What every result line says about the model."""
    weight = next(model.parameters())
    return {
        "pos_emb": trained.position.pos_emb,
        "pos_emb_args": trained.flat()["pos_emb_args"],
        "train_length": trained.model.seq_length,
        "step": about["step"],
        "windows_per_step": about.get("windows_per_step"),
        "config_hash": about["config_hash"],
        "seed": trained.training.seed,
        "checkpoint": about["path"],
        "tokenizer": (about.get("tokenizer") or {}).get("hash"),
        "dtype": str(weight.dtype).removeprefix("torch."),
        "attention_backend": model.resolved_backend,
        **seen_as(given),
        "device": weight.device.type,
        "commit": commit(),
    }


def seen_as(given: Config) -> dict[str, Any]:
    """Changes to what a token sees, made for this evaluation or in training; nothing where there are none."""
    attention = given.attention
    changes = {"window": attention.window, "blockwise": attention.blockwise, "logn_scale": attention.logn_scale}
    return {key: value for key, value in changes.items() if value}


def facts_of_text(tokens: TokenFile, given: Config, protocol: str) -> dict[str, Any]:
    """What every result line says about the text."""
    corpus = tokens.meta.get("corpus") or tokens.prefix.name
    return {"corpus": corpus, "part": given.evaluation.eval_part, "split": given.data.split, "protocol": protocol}


if __name__ == "__main__":
    run(main, purpose="evaluate", options=add_options, config_needed=False)
