"""One evaluation from checkpoint to rows: several protocols and variants of the same weights."""

import argparse
import logging
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch

from megatron.commit import commit
from megatron.config import Config
from megatron.config.schema import Attention
from megatron.data.tokens import TokenFile
from megatron.errors import UserError
from megatron.evaluation.agreement import check_known_tokens, check_same_model, check_same_tokenizer
from megatron.evaluation.perplexity import Advance, measured
from megatron.evaluation.progress import progress
from megatron.evaluation.protocols import PROTOCOLS, Request, Windows
from megatron.evaluation.resume import WindowFile, answered, code_fingerprint, file_fingerprint
from megatron.model import GPT, AttentionSettings
from megatron.parallel.grid import Grid, here
from megatron.results.files import check_output, existing_results, write_results
from megatron.results.row import Row
from megatron.training.checkpoint import find, load_for_evaluation

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

logger = logging.getLogger(__name__)


def evaluate(
    config: Config | None, options: argparse.Namespace
) -> tuple[dict[Path, list[Row]], list[int]]:
    """Measure what the options ask for: rows by the file that holds them, and the lengths."""
    model, trained, about = load_for_evaluation(
        options.checkpoint or folder_of(config, options.step), options.step
    )
    given = config or trained
    tokens = TokenFile.open(given.data.data_path or trained.data.data_path or "")
    check_same_model(
        what_must_agree(given, trained), what_must_agree(trained, trained), about["path"]
    )
    check_same_tokenizer(tokens, about.get("tokenizer") or {}, about["path"])
    asked = request(tokens, given, trained.training.seed, options)
    windows_of = {
        protocol: PROTOCOLS[protocol](asked) for protocol in dict.fromkeys(options.protocol)
    }
    for windows in windows_of.values():
        check_known_tokens(windows, about["vocab"], about["path"])
    grid = here()
    model.to(grid.device, DTYPES[options.dtype])
    rows: dict[Path, list[Row]] = {}
    measuring = [*product(variants(given.attention, options), windows_of)]
    outputs = [
        options.output or default_output(about["path"], tokens, given, *one, options.dtype)
        for one in measuring
    ]
    for output in outputs:
        check_output(output)
    facts = facts_of(model, trained, about)
    for output, (attention, protocol) in zip(outputs, measuring, strict=True):
        model.use_attention(AttentionSettings.of(attention))
        logger.info("attention %s", model.attention_choice)
        more = {"attention_backend": model.resolved_backend, **seen_as(attention)}
        question = facts | more | facts_of_text(tokens, given, protocol)
        with progress(protocol, shown=grid.first) as advance:
            found = answers(model, question, windows_of[protocol], output, given, grid, advance)
        rows.setdefault(output, []).extend(found)
    return rows, asked.checked_lengths


def request(tokens: TokenFile, given: Config, seed: int, options: argparse.Namespace) -> Request:
    """The text and the lengths that configuration and options ask for."""
    asked = given.evaluation
    return Request(
        tokens,
        options.lengths or asked.eval_lengths,
        given.data.split,
        asked.eval_part,
        asked.eval_tokens,
        seed,
        options.windows,
        options.start,
        options.tail,
        options.stride,
    )


def variants(attention: Attention, options: argparse.Namespace) -> Iterator[Attention]:
    """The section `attention` with each window and each log-n scale that the options ask for."""
    windows = [window_of(text) for text in options.window or []] or [attention.window]
    scales = [text == "on" for text in options.logn_scale or []] or [attention.logn_scale]
    for window, scale in product(dict.fromkeys(windows), dict.fromkeys(scales)):
        yield attention.model_copy(update={"window": window, "logn_scale": scale})


def window_of(text: str) -> int | str | None:
    if text in ("none", "train_length"):
        return None if text == "none" else text
    if not text.isdecimal() or int(text) < 1:
        raise UserError(
            f"--window {text}: give a number of tokens of at least 1, train_length or none"
        )
    return int(text)


def answers(
    model: GPT,
    question: Row,
    windows_of: Sequence[Windows],
    output: Path,
    given: Config,
    grid: Grid,
    advance: Advance,
) -> list[Row]:
    """A row for each length, those that are there and those that are missing, which are written as soon as known."""
    rows: list[Row] = []
    there = grid.gather(existing_results(output))[0]
    for windows in windows_of:
        whole = question | windows.about | {"length": windows.length, "text": windows.text}
        # Means between other positions are another answer: the lengths asked for are among the edges.
        asked = whole | ({"position_edges": list(windows.edges)} if windows.edges else {})
        row = answered(asked, there)
        if row is None:
            journal = WindowFile(output, asked, grid.rank)
            one = measured(
                model,
                windows,
                batch_tokens=given.evaluation.eval_batch_tokens,
                grid=grid,
                journal=journal,
                advance=advance,
            )
            row = whole | one.row()
            if grid.first:
                write_results(
                    output, [row]
                )  # at once: the longest length may be the one that fails
                journal.remove()
        rows.append(row)
    return rows


def folder_of(config: Config | None, step: int | None) -> str:
    """The checkpoint whose own config.yml is given; else load or save, whichever holds one; UserError if two different
    ones do, or none is named."""
    own = Path(config.sources[0]).parent if config and config.sources else None
    if own is not None and step is None and (own / "checkpoint.json").exists():
        return str(own)
    named = [config.checkpoint.load, config.checkpoint.save] if config else []
    folders = list(dict.fromkeys(folder for folder in named if folder))
    if not folders:
        raise UserError(
            "checkpoint: none is named - give the configuration of a run, or --checkpoint DIR"
        )
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
    paths = [
        Path(one.data.data_path or trained.data.data_path or "").resolve()
        for one in (config, trained)
    ]
    split = {"split": config.data.split} if paths[0] == paths[1] else {}
    return config.model_keys() | split


def default_output(
    checkpoint: str,
    tokens: TokenFile,
    given: Config,
    attention: Attention,
    protocol: str,
    dtype: str,
) -> Path:
    """In the run's folder, by what is measured: another corpus, part, protocol or variant replaces nothing."""
    words = [
        tokens.prefix.name,
        given.evaluation.eval_part,
        Path(checkpoint).name,
        *([protocol] if protocol != "equal_tokens" else []),
        *([dtype] if dtype != "fp32" else []),
        *(
            f"{key}={value}" if value is not True else key
            for key, value in seen_as(attention).items()
        ),
    ]
    return Path(checkpoint).parent / "evaluation" / ("-".join(words) + ".jsonl")


def facts_of(model: GPT, trained: Config, about: dict[str, Any]) -> Row:
    """What every result line says about the model and the code."""
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
        "weights": file_fingerprint(Path(about["path"]) / "model.safetensors"),
        "tokenizer": (about.get("tokenizer") or {}).get("hash"),
        "dtype": str(weight.dtype).removeprefix("torch."),
        "device": weight.device.type,
        "commit": commit(),
        "code": code_fingerprint(),
    }


def seen_as(attention: Attention) -> dict[str, Any]:
    """Changes to what a token sees, made for this evaluation or in training; nothing where there are none."""
    changes = {
        "window": attention.window,
        "blockwise": attention.blockwise,
        "logn_scale": attention.logn_scale,
    }
    return {key: value for key, value in changes.items() if value}


def facts_of_text(tokens: TokenFile, given: Config, protocol: str) -> Row:
    """What every result line says about the text."""
    corpus = tokens.meta.get("corpus") or tokens.prefix.name
    return {
        "corpus": corpus,
        "part": given.evaluation.eval_part,
        "split": given.data.split,
        "protocol": protocol,
    }
