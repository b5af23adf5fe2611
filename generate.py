"""Continue texts with a checkpoint.

python generate.py --checkpoint runs/mep --prompt "The theorem" --max-new-tokens 64 --seed 1
python generate.py --checkpoint runs/mep --temperature 0 < essay.txt
python generate.py --checkpoint runs/mep --prompts many.txt --output answers.jsonl
python deepy.py generate.py configs/mep.yml --window 512 --sinks 4 --max-new-tokens 2000

One continuation goes to standard output, token by token, with a line feed at the end. Several are
JSON lines, in the order of the prompts. The speed goes to standard error.
"""

import argparse
import json
import logging
import sys
import time
from dataclasses import replace
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn

from megatron.config import Config
from megatron.entry import run
from megatron.errors import UserError, visible
from megatron.evaluation.loaded_run import variant
from megatron.evaluation.methods import MeasuredAttention
from megatron.evaluation.options import DTYPES, VARIED, add_attention
from megatron.files import check_output, read_small, write_output
from megatron.generation.decode import NUMBERS, GenerationSettings, continued
from megatron.generation.with_tokenizer import opened_with_tokenizer
from megatron.parallel.grid import device_alone
from megatron.parallel.threads import count_parameters, use_threads

LONGEST = 1 << 26  # bytes of prompts, characters of standard input

logger = logging.getLogger("megatron.generate")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The words of generate.py beside files and settings."""
    add = parser.add_argument
    prompt = "text to continue, may be given several times; default: standard input"
    add("--prompt", action="append", default=[], metavar="TEXT", help=prompt)
    add("--prompts", type=Path, metavar="FILE", help="a file with one prompt in each line")
    output = "write JSON lines to a file, with the settings of each continuation"
    add("-o", "--output", type=Path, metavar="FILE", help=output)
    add("--checkpoint", type="path", metavar="DIR", help="folder of a run or of one checkpoint")
    add("--step", type=int, metavar="N", help="which checkpoint of the run; default: the latest")
    for name, number in NUMBERS.items():
        usual = getattr(GenerationSettings, name)
        meaning = number.meaning if usual is None else f"{number.meaning}; default: {usual}"
        option = f"--{name.replace('_', '-')}"
        add(option, type=type(number.least), default=usual, metavar="X", help=meaning)
    stop = "end before this string; may be given several times; \\n is a line feed"
    add("--stop", action="append", default=[], metavar="TEXT", help=stop)
    add("--ignore-eod", action="store_true", help="continue beyond the end of a document")
    add("--no-cache", action="store_true", help="no cache: compute all tokens again for each one")
    add_attention(parser, default=argparse.SUPPRESS)
    dtype = "of the model; tables stay float32"
    add("--dtype", choices=tuple(DTYPES), default="fp32", help=dtype)


def main(config: Config | None, arguments: argparse.Namespace) -> None:
    """Continue what is asked for, and write it where it is wanted."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")
    numbers = {name: getattr(arguments, name) for name in NUMBERS}
    stops = [stop.replace("\\n", "\n").replace("\\t", "\t") for stop in arguments.stop]
    settings = GenerationSettings(
        **numbers,
        stops=tuple(stops),
        past_documents=arguments.ignore_eod,
        cached=not arguments.no_cache,
    )
    settings.check()
    output = arguments.output
    if output is not None:
        check_output(output)
    prompts = prompts_of(arguments)
    device = device_alone()

    trained, tokenizer = opened_with_tokenizer(config, arguments.checkpoint, arguments.step)
    model = trained.model
    changes = {key: getattr(arguments, key) for key in VARIED if hasattr(arguments, key)}
    if "window" in changes:
        changes["window_layers"] = ()
    attention = replace(MeasuredAttention.of(trained.config.attention), **changes)
    model.use_attention(attention)
    model.to(device, DTYPES[arguments.dtype])
    use_threads(count_parameters(model), device)
    facts = {
        "checkpoint": str(trained.path),
        "step": trained.record["step"],
        "config_hash": trained.record["config_hash"],
        **{name: numbers[name] for name in numbers if name not in ("samples", "batch_size")},
        "dtype": arguments.dtype,
        **variant(attention),
        **trained.begin_of_text,
    }
    is_single = len(prompts) == 1 and settings.samples == 1 and output is None
    rows: dict[tuple[int, int], dict[str, Any]] = {}
    tokens = 0
    begin = time.perf_counter()
    try:
        for texts in continued(model, tokenizer, prompts, settings):
            tokens += len(texts)
            if is_single:
                piece = texts[0].written.take()
                # A model may write what would move the cursor or more; files get it as it is.
                sys.stdout.write(visible(piece) if sys.stdout.isatty() else piece)
                sys.stdout.flush()
            for text in texts:
                if text.ended is not None:
                    rows[text.number, text.sample] = {
                        "prompt": prompts[text.number],
                        "continuation": text.written.text,
                        "prompt_number": text.number,
                        "sample": text.sample,
                        "prompt_tokens": len(text.prompt),
                        "new_tokens": text.new,
                        "ended": text.ended,
                        **facts,
                    }
        if is_single:
            sys.stdout.write("\n")
        seconds = time.perf_counter() - begin
        words = f"{trained.path}, config {facts['config_hash']}, seed {settings.seed}"
        speed = f"{tokens} tokens in {seconds:.2f} s: {tokens / seconds:.1f} tokens/s"
        logger.info("%s (%s)", speed, words)
    finally:
        # If ctrl-C or a fault ends it, texts that are finished are written.
        lines = "".join(json.dumps(rows[key], ensure_ascii=False) + "\n" for key in sorted(rows))
        if output is None and not is_single:
            sys.stdout.write(lines)
        elif output is not None and lines:
            write_output(output, lines.encode())
            logger.info("written to %s", output)


def prompts_of(arguments: argparse.Namespace) -> list[str]:
    """All prompts that are given; UserError for none, and for files that are not text."""
    prompts = list(arguments.prompt)
    path = arguments.prompts
    if path is not None:
        try:
            lines = read_small(path, LONGEST).decode("utf-8-sig").replace("\r\n", "\n").split("\n")
        except (OSError, UnicodeDecodeError) as fault:
            raise UserError(f"--prompts: {path} cannot be read as text ({fault})") from None
        prompts += [line for line in lines if line.strip()]
    elif not prompts and sys.stdin is not None and not sys.stdin.isatty():
        text = sys.stdin.read(LONGEST)
        if len(text) == LONGEST:
            raise UserError(f"standard input: has {LONGEST:,} characters or more - give fewer")
        prompts = [text.removeprefix("\ufeff")]
    if not prompts:
        raise UserError(
            "--prompt: no prompt is given - write --prompt TEXT or --prompts FILE, or send a text"
            " to standard input"
        )
    try:
        "".join(prompts).encode()
    except UnicodeEncodeError:
        raise UserError("--prompt: a prompt is not UTF-8 text; convert it first") from None
    return prompts


def command() -> NoReturn:
    run(main, options=add_options, config_needed=False)


if __name__ == "__main__":
    command()
