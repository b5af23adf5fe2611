"""Continue texts with a checkpoint.

python generate.py --checkpoint runs/mep --prompt "The theorem" --max-new-tokens 64 --seed 1
python generate.py --checkpoint runs/mep --prompt-file essay.txt --temperature 0
python generate.py --checkpoint runs/mep --prompts many.jsonl --output answers.jsonl
cat essay.txt | python generate.py --checkpoint runs/mep --top-p 0.9
python generate.py --checkpoint runs/mep --interactive --stop "\\n"
python deepy.py generate.py configs/mep.yml --window 512 --sinks 4 --max-new-tokens 100000

One text is written to standard output as it comes: the continuation alone, and a line feed.
Several are JSON lines, in the order of the prompts. How fast it was goes to standard error.
"""

import argparse
import json
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from megatron.config import Config
from megatron.data.tokenizers.tokenizer import Tokenizer
from megatron.entry import add_number, run
from megatron.errors import UserError, visible
from megatron.evaluation.loaded_run import variant
from megatron.evaluation.options import DTYPES, VARIED, add_attention
from megatron.files import write_text
from megatron.generation.decode import (
    Continuation,
    GenerationSettings,
    continuations,
    decode_in_batches,
)
from megatron.generation.with_tokenizer import opened_with_tokenizer
from megatron.model import GPT, AttentionSettings
from megatron.parallel.grid import here
from megatron.parallel.threads import count_parameters, use_threads
from megatron.results.files import check_place

CONTROL = (*range(0x20), *range(0x7F, 0xA0))
NOT_FOR_TERMINALS = {code: "\ufffd" for code in CONTROL if chr(code) not in "\t\n"}
"""A model may write what would move the cursor or more; files get it as it is."""

logger = logging.getLogger("megatron.generate")


class Session(NamedTuple):
    """A model that continues texts. facts: all that a row says about it"""

    model: GPT
    tokenizer: Tokenizer
    settings: GenerationSettings
    facts: dict[str, Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The words of generate.py beside files and settings."""
    add = parser.add_argument
    prompt = "text to continue, or - for standard input; may be given several times"
    add("--prompt", action="append", default=[], metavar="TEXT", help=prompt)
    one = "a file that is one prompt as a whole; may be given several times"
    add("--prompt-file", action="append", default=[], type=Path, metavar="FILE", help=one)
    many = 'a file of prompts: one in each line, or in .jsonl {"prompt": "…"} in each line'
    add("--prompts", type=Path, metavar="FILE", help=many)
    add("-i", "--interactive", action="store_true", help="continue each line that is typed")
    output = "write JSON lines to a file, with the settings of each continuation"
    add("-o", "--output", type=Path, metavar="FILE", help=output)
    add("--checkpoint", metavar="DIR", help="folder of a run or of one checkpoint")
    add("--step", type=int, metavar="N", help="which checkpoint of the run; default: the latest")

    usual = GenerationSettings()
    most = "tokens of a continuation at most"
    add_number(parser, "--max-new-tokens", usual.max_new_tokens, most)
    add_number(parser, "--seed", usual.seed, "of what is drawn")
    add_number(parser, "--samples", usual.samples, "continuations of each prompt")
    temperature = "0: always the likeliest token; default: %(default)s"
    add("--temperature", type=float, default=usual.temperature, metavar="T", help=temperature)
    add("--top-k", type=int, metavar="K", help="draw among the K likeliest tokens")
    top_p = "draw among the likeliest tokens that together have the probability P"
    add("--top-p", type=float, metavar="P", help=top_p)
    penalty = "divides the logits of tokens that the text has; default: 1, none"
    add("--repetition-penalty", type=float, default=1.0, metavar="X", help=penalty)
    stop = "end before this string; may be given several times; \\n is a line feed"
    add("--stop", action="append", default=[], metavar="TEXT", help=stop)
    add("--ignore-eod", action="store_true", help="go on behind the end of a document")
    add_number(parser, "--batch-size", usual.batch, "texts that are continued together")
    add("--no-cache", action="store_true", help="compute everything again for each token")

    add_attention(parser, default=argparse.SUPPRESS)
    dtype = "of the model; tables stay float32"
    add("--dtype", choices=tuple(DTYPES), default="fp32", help=dtype)


def main(config: Config | None, arguments: argparse.Namespace) -> None:
    """Continue what is asked for, and write it where it is wanted."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")
    settings = GenerationSettings(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        repetition_penalty=arguments.repetition_penalty,
        max_new_tokens=arguments.max_new_tokens,
        seed=arguments.seed,
        samples=arguments.samples,
        stops=[stop.replace("\\n", "\n").replace("\\t", "\t") for stop in arguments.stop],
        past_documents=arguments.ignore_eod,
        batch=arguments.batch_size,
        cached=not arguments.no_cache,
    )
    settings.check()
    output = arguments.output
    if output is not None:
        check_place(output)
        if arguments.interactive:
            raise UserError("--interactive: writes to the terminal; leave --output out")
        if output.exists() and output.stat().st_size:
            raise UserError(f"--output: {output} exists - name a new file, or remove this one")
    prompts = [] if arguments.interactive else prompts_of(arguments)
    if here().ranks > 1:
        raise UserError("generate.py: is one process; start it without torchrun or srun")

    trained, tokenizer = opened_with_tokenizer(config, arguments.checkpoint, arguments.step)
    model = trained.model
    model.use_attention(attention_of(AttentionSettings.of(trained.config.attention), arguments))
    model.to(here().device, DTYPES[arguments.dtype])
    use_threads(count_parameters(model), here().device)
    named = ("seed", "repetition_penalty", "temperature", "top_k", "top_p", "max_new_tokens")
    facts = {
        "checkpoint": str(trained.path),
        "step": trained.record["step"],
        "config_hash": trained.record["config_hash"],
        **{name: getattr(settings, name) for name in named},
        "dtype": arguments.dtype,
        **variant(model.attention),
    }
    session = Session(model, tokenizer, settings, facts)
    if arguments.interactive:
        converse(session)
    elif len(prompts) == 1 and settings.samples == 1 and output is None:
        stream(session, prompts[0])
    else:
        write_rows(session, prompts, output)


def prompts_of(arguments: argparse.Namespace) -> list[str]:
    """All prompts that are given; UserError for none, and for files that are not text."""
    prompts = [sys.stdin.read() if text == "-" else text for text in arguments.prompt]
    prompts += [text_of("--prompt-file", path) for path in arguments.prompt_file]
    if arguments.prompts is not None:
        path = arguments.prompts
        lines = [line for line in text_of("--prompts", path).split("\n") if line.strip()]
        if not lines:
            raise UserError(f"--prompts: {path} has no line with a prompt")
        for line in lines:
            prompt: Any = line
            if path.suffix == ".jsonl":
                try:
                    prompt = json.loads(line)
                except (ValueError, RecursionError):
                    prompt = None
                if isinstance(prompt, dict):
                    prompt = prompt.get("prompt", prompt.get("text"))
            if not isinstance(prompt, str):
                raise UserError(
                    f'--prompts: {path}: {line[:50]} has no prompt; write {{"prompt": "…"}}'
                )
            prompts.append(prompt)
    if not prompts and (sys.stdin is None or sys.stdin.isatty()):
        raise UserError(
            "--prompt: no prompt is given - write --prompt TEXT, --prompt-file FILE, --prompts FILE"
            " or --interactive, or send a text to standard input"
        )
    prompts = prompts or [sys.stdin.read()]
    try:
        "".join(prompts).encode()
    except UnicodeEncodeError:
        raise UserError("--prompt: a prompt is not UTF-8 text; convert it first") from None
    return prompts


def text_of(option: str, path: Path) -> str:
    """The text of a file; UserError if it has none."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise UserError(f"{option}: {path} cannot be read as text ({fault})") from None


def attention_of(attention: AttentionSettings, arguments: argparse.Namespace) -> AttentionSettings:
    """The settings with what the options change."""
    changes = {key: getattr(arguments, key) for key in VARIED if hasattr(arguments, key)}
    if "window" in changes:
        changes["window_layers"] = ()
    return replace(attention, **changes)


def continued(session: Session, prompts: Sequence[str]) -> Iterator[list[Continuation]]:
    """After each step, the texts that have got a token; in the end a line about the speed."""
    model, tokenizer, settings, facts = session
    texts = continuations(tokenizer, prompts, settings)
    begin = time.perf_counter()
    yield from decode_in_batches(model, tokenizer.vocab_size, texts, settings)
    seconds = time.perf_counter() - begin
    tokens = sum(text.new for text in texts)
    words = f"{facts['checkpoint']}, config {facts['config_hash']}, seed {facts['seed']}"
    speed = f"{tokens} tokens in {seconds:.2f} s: {tokens / seconds:.1f} tokens/s"
    logger.info("%s (%s)", speed, words)


def stream(session: Session, prompt: str) -> None:
    """Write a continuation as it comes, and a line feed."""
    for texts in continued(session, [prompt]):
        piece = texts[0].written.take()
        sys.stdout.write(piece.translate(NOT_FOR_TERMINALS) if sys.stdout.isatty() else piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()


def converse(session: Session) -> None:
    """Continue each line that is typed, until the end of the input; ctrl-C ends one text."""
    print("one prompt in each line; ctrl-D ends", file=sys.stderr)
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            print(file=sys.stderr)
            return
        if not line.strip():
            continue
        try:
            stream(session, line.removesuffix("\n"))
        except KeyboardInterrupt:
            print()
        except UserError as fault:
            print(visible(str(fault)), file=sys.stderr)


def write_rows(session: Session, prompts: Sequence[str], output: Path | None) -> None:
    """Write a JSON line for each continuation, in the order of the prompts.

    If ctrl-C or a fault ends it, texts that are finished are written.
    """
    rows: dict[tuple[int, int], dict[str, Any]] = {}
    try:
        for texts in continued(session, prompts):
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
                        **session.facts,
                    }
    finally:
        lines = [json.dumps(rows[key], ensure_ascii=False) + "\n" for key in sorted(rows)]
        if output is None:
            sys.stdout.write("".join(lines))
            sys.stdout.flush()
        elif lines:
            write_text(output, "".join(lines))
            logger.info("written to %s", output)


def command() -> NoReturn:
    run(main, options=add_options, config_needed=False)


if __name__ == "__main__":
    command()
