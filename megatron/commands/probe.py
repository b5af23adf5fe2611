"""What perplexity hides: retrieval by depth and length, the effective receptive field, and where attention looks.

python tools/probe.py --checkpoint runs/mep [--step 2000] [--lengths 512 1024] [--probes passkey recall]
python tools/probe.py --checkpoint runs/mep eval_part=test --output probes.jsonl
"""

import argparse
import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from megatron.config import Config
from megatron.data.samples import split_documents
from megatron.data.tokens import TokenFile
from megatron.entry import run
from megatron.errors import UserError
from megatron.evaluation.agreement import check_known_tokens, check_same_model, check_same_tokenizer
from megatron.evaluation.probes.attention import attention_by_distance, edges
from megatron.evaluation.probes.receptive_field import reach, receptive_field, thinned
from megatron.evaluation.probes.retrieval import TASKS, measured, scores_of
from megatron.evaluation.protocols import Windows, first_tokens
from megatron.evaluation.run import facts_of, facts_of_text, folder_of, seen_as, what_must_agree
from megatron.model import GPT, AttentionSettings
from megatron.report.figures.positions import write
from megatron.report.figures.probes import draw_probes
from megatron.results.probes import PROBES, existing_probes, joined, write_probes
from megatron.results.row import Row, run_of
from megatron.training.checkpoint import load_for_evaluation


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint", metavar="DIR", help="folder of a run or of one checkpoint")
    parser.add_argument(
        "--step", type=int, metavar="N", help="which checkpoint of the run; default: the latest"
    )
    parser.add_argument(
        "--lengths", type=int, nargs="+", metavar="L", help="context lengths; default: eval_lengths"
    )
    parser.add_argument(
        "--probes",
        nargs="+",
        choices=PROBES,
        default=PROBES,
        metavar="NAME",
        help=", ".join(PROBES),
    )
    parser.add_argument(
        "--depths", type=int, default=5, metavar="N", help="places in the context; default: 5"
    )
    parser.add_argument(
        "--trials",
        type=int,
        default=8,
        metavar="N",
        help="contexts per length and depth; default: 8",
    )
    parser.add_argument(
        "--probe_seed", type=int, default=0, metavar="N", help="of the questions; default: 0"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="JSON lines; the picture goes beside it as .png"
    )


def main(config: Config | None, options: argparse.Namespace) -> None:
    if min(options.depths, options.trials) < 1:
        raise UserError(
            f"--depths {options.depths} --trials {options.trials}: give at least 1 of each"
        )
    model, trained, about = load_for_evaluation(
        options.checkpoint or folder_of(config, options.step), options.step
    )
    given = config or trained
    tokens = TokenFile.open(given.data.data_path or trained.data.data_path or "")
    check_same_model(
        what_must_agree(given, trained), what_must_agree(trained, trained), about["path"]
    )
    check_same_tokenizer(tokens, about.get("tokenizer") or {}, about["path"])
    words = [tokens.prefix.name, given.evaluation.eval_part, Path(about["path"]).name]
    words += [f"{key}={value}" for key, value in seen_as(given.attention).items()] + [
        "probes.jsonl"
    ]
    output = options.output or Path(about["path"]).parent / "evaluation" / "-".join(words)
    existing = existing_probes(output)  # a UserError for another kind of file
    lengths = sorted(set(options.lengths or given.evaluation.eval_lengths))
    text = held_out(
        tokens, given, max(given.evaluation.eval_tokens, lengths[-1] + 1), lengths[-1] + 1
    )
    check_known_tokens([Windows(len(text) - 1, [text], [0])], about["vocab"], about["path"])
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    model.use_attention(AttentionSettings.of(given.attention))
    seen = {"attention_backend": model.resolved_backend, **seen_as(given.attention)}
    facts = facts_of(model, trained, about) | seen | facts_of_text(tokens, given, "probes")
    rows: list[Row] = []
    for row in probed(model, text, lengths, options):
        rows.append(facts | row)
        write_probes(output, joined(existing, rows))
    own = [row for row in joined(existing, rows) if run_of(row) == run_of(facts)]
    write(
        draw_probes(own, f"{facts['pos_emb']}, trained at {facts['train_length']}"),
        output.with_suffix(".png"),
    )
    print(f"\nwritten to {output} and {output.with_suffix('.png')}")


def held_out(tokens: TokenFile, given: Config, wanted: int, needed: int) -> np.ndarray:
    """The first tokens of a part, `wanted` where it has them; UserError where it has fewer than `needed`."""
    part = given.evaluation.eval_part
    text = first_tokens(tokens, split_documents(tokens, given.data.split, part), wanted)
    if len(text) < needed:
        raise UserError(
            f"--lengths: the {part} part has {len(text)} tokens, {needed} are needed; give shorter lengths"
        )
    return text


def probed(
    model: GPT, text: np.ndarray, lengths: Sequence[int], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Rows without the facts that they share, each as soon as it is known."""
    depths = [round(cell / max(1, options.depths - 1), 4) for cell in range(options.depths)]
    settings = {"depths": depths, "trials": options.trials, "seed": options.probe_seed}
    device = next(model.parameters()).device
    for length in lengths:
        starts = range(0, min(len(text) - length, options.trials * length), length)
        windows = [text[start : start + length + 1] for start in starts]
        for probe in options.probes:
            start = time.perf_counter()
            if probe in TASKS:
                found = measured(scores_of(model), probe, text, length, device=device, **settings)
                results = [
                    dataclasses.asdict(one) | {"probe_seed": options.probe_seed} for one in found
                ]
                said = " ".join(
                    "n/a" if one.accuracy is None else f"{one.accuracy:.3f}" for one in found
                )
            else:
                results = [OTHERS[probe](model, windows)]
                said = results[0].get("reason") or {
                    k: v for k, v in results[0].items() if isinstance(v, int | float)
                }
            seconds = time.perf_counter() - start
            print(f"{probe} at {length}: {said}   ({seconds:.1f} s)")
            yield from (
                {"probe": probe, "length": length, "seconds": seconds} | result
                for result in results
            )


def of_receptive_field(model: GPT, windows: Sequence[np.ndarray]) -> dict[str, Any]:
    try:
        cumulative = receptive_field(model, windows)
    except UserError as refusal:
        return {"windows": len(windows), "reason": str(refusal)}
    distances, values = thinned(cumulative.tolist())
    return {
        "windows": len(windows),
        "reach": reach(cumulative),
        "distances": distances,
        "cumulative": values,
    }


def of_attention(model: GPT, windows: Sequence[np.ndarray]) -> dict[str, Any]:
    length = len(windows[0]) - 1
    try:
        entropy, mass = attention_by_distance(model, windows)
    except UserError as refusal:
        return {"windows": len(windows), "reason": str(refusal)}
    tables = {
        name: np.round(table.numpy(), 6).tolist()
        for name, table in (("entropy", entropy), ("mass", mass))
    }
    return {
        "windows": len(windows),
        "edges": edges(length),
        "mean_entropy": round(entropy.mean().item(), 4),
        **tables,
    }


OTHERS = {"receptive_field": of_receptive_field, "attention": of_attention}


def command() -> NoReturn:
    run(main, purpose="evaluate", options=add_options, config_needed=False)
