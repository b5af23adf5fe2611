"""Continue texts with a checkpoint.

python generate.py --checkpoint runs/mep --prompt "The theorem" --max-new-tokens 64 --seed 1
python generate.py --checkpoint runs/mep --temperature 0 < essay.txt
python generate.py --checkpoint runs/mep --prompts many.txt --output answers.jsonl
python deepy.py generate.py configs/mep.yml --window 512 --sinks 4 --max-new-tokens 2000

A single continuation is written to standard output, followed by a line feed. Several are written as
JSON lines, in the order of the prompts.
"""

import argparse
import json
import logging
import sys
from dataclasses import replace
from io import TextIOWrapper
from pathlib import Path

from megatron.config import Config
from megatron.entry import run
from megatron.errors import UserError, visible
from megatron.evaluation.loaded_run import checked_tokenizer, loaded_model, variant
from megatron.evaluation.methods import MOST, MeasuredAttention
from megatron.evaluation.options import DTYPES, VARIED, add_attention, number
from megatron.files import check_output, read_small, write_output
from megatron.generation import generated, prompt_ids
from megatron.parallel.grid import device_alone
from megatron.parallel.threads import count_parameters, use_threads

SETTINGS = (
    "max_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "seed",
    "ignore_eod",
)
LONGEST = 1 << 26  # bytes of prompts

logger = logging.getLogger("megatron.generate")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of generate.py, in addition to files and settings."""
    add = parser.add_argument
    add(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="text to continue, may be repeated; default: standard input",
    )
    add("--prompts", type=Path, metavar="FILE", help="a file with one prompt in each line")
    add(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="write JSON lines to this file, with the settings of each continuation",
    )
    add("--checkpoint", type="path", metavar="DIR", help="folder of a run or of a checkpoint")
    add("--step", type=int, metavar="N", help="which checkpoint of the run; default: the latest")
    add(
        "--max-new-tokens",
        type=number(1, MOST),
        default=64,
        metavar="N",
        help="largest number of new tokens; default: 64",
    )
    add(
        "--temperature",
        type=float,
        default=1.0,
        metavar="X",
        help="divide the logits by this; 0: always take the likeliest token; default: 1",
    )
    add("--top-k", type=number(1, MOST), metavar="N", help="sample from this many likeliest tokens")
    add(
        "--top-p",
        type=float,
        metavar="P",
        help="sample from the likeliest tokens that together have this probability",
    )
    add("--seed", type=number(0, MOST), default=0, metavar="N", help="seed of the random draws")
    add(
        "--samples",
        type=number(1, MOST),
        default=1,
        metavar="N",
        help="continuations of each prompt; default: 1",
    )
    add("--ignore-eod", action="store_true", help="continue beyond the end of a document")
    add(
        "--no-cache",
        action="store_true",
        help="use no cache: recompute all tokens for each new one",
    )
    add_attention(parser, default=argparse.SUPPRESS)
    add("--dtype", choices=tuple(DTYPES), default="fp32", help="of the model; tables stay float32")


def main(config: Config | None, arguments: argparse.Namespace) -> None:
    """Continue all prompts, and write the continuations to the chosen place."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")
    output, samples = arguments.output, arguments.samples
    if output is not None:
        check_output(output)
    prompts = prompts_of(arguments)
    device = device_alone()

    trained = loaded_model(config, arguments.checkpoint, arguments.step)
    tokenizer = checked_tokenizer(trained)
    model = trained.model
    changes = {key: getattr(arguments, key) for key in VARIED if hasattr(arguments, key)}
    if "window" in changes:
        changes["window_layers"] = ()
    attention = replace(MeasuredAttention.of(trained.config.attention), **changes)
    model.use_attention(attention)
    trained.to(device, arguments.dtype)
    use_threads(count_parameters(model), device)
    settings = {name: getattr(arguments, name) for name in SETTINGS}
    facts = {
        "checkpoint": str(trained.path),
        "step": trained.record["step"],
        "config_hash": trained.record["config_hash"],
        **settings,
        "dtype": arguments.dtype,
        **variant(attention),
        **trained.begin_of_text,
    }
    lines = []
    try:
        for number_of_prompt, prompt in enumerate(prompts):
            ids = prompt_ids(model, tokenizer, prompt)
            # Samples depend only on the seed and the prompt's number, not on other prompts.
            settings["seed"] = arguments.seed + number_of_prompt
            texts = generated(
                model, tokenizer, ids, samples=samples, use_cache=not arguments.no_cache, **settings
            )
            for sample, new in enumerate(texts):
                text = tokenizer.decode(new)
                row = {"prompt": prompt, "continuation": text, "prompt_number": number_of_prompt}
                lines.append(row | {"sample": sample, "new_tokens": len(new)} | facts)
    finally:
        # After ctrl-C or a fault, the finished texts are still written.
        content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in lines)
        if output is not None and lines:
            write_output(output, content.encode())
            logger.info("written to %s", output)
        elif len(prompts) == samples == 1:
            text = "".join(row["continuation"] + "\n" for row in lines)
            # A model may write control characters, for example to move the cursor; files get them
            # unchanged.
            sys.stdout.write(visible(text) if sys.stdout.isatty() else text)
        else:
            sys.stdout.write(content)


def prompts_of(arguments: argparse.Namespace) -> list[str]:
    """All prompts; UserError if there are none, or if a file is not text."""
    prompts = list(arguments.prompt)
    path = arguments.prompts
    if path is not None:
        try:
            lines = read_small(path, LONGEST).decode("utf-8-sig").replace("\r\n", "\n").split("\n")
        except (OSError, UnicodeDecodeError) as fault:
            raise UserError(f"--prompts: {path} cannot be read as text ({fault})") from None
        prompts += [line for line in lines if line.strip()]
    elif not prompts and sys.stdin is not None and not sys.stdin.isatty():
        prompts = [sys.stdin.read().removeprefix("\ufeff")]
    if not prompts:
        raise UserError(
            "--prompt: there is no prompt - write --prompt TEXT or --prompts FILE, or pipe a text"
            " to standard input"
        )
    return prompts


if __name__ == "__main__":
    run(main, options=add_options, config_needed=False)
