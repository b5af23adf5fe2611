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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn

from evaluate import check_words, number_of, window_of
from megatron.config import Config
from megatron.data.tokenizers.tokenizer import Tokenizer
from megatron.entry import add_number, run
from megatron.errors import UserError, visible
from megatron.evaluation.opened import Trained, variant
from megatron.evaluation.run import DTYPES
from megatron.files import write_text
from megatron.generation.opened import opened_with_tokenizer
from megatron.generation.run import Continuation, Settings, Speed, continued
from megatron.generation.sampling import Sampling
from megatron.model import AttentionSettings
from megatron.model.methods import METHODS
from megatron.parallel.grid import here
from megatron.parallel.threads import count_parameters, use_threads
from megatron.results.files import check_place

FROM_STDIN = "-"
CONTROL = (*range(0x20), *range(0x7F, 0xA0))
NOT_FOR_TERMINALS = {code: "\ufffd" for code in CONTROL if chr(code) not in "\t\n"}
"""A model may write what would move the cursor or more; files get it as it is."""
PROMPT_KEYS = ("prompt", "text")  # of an object in a file of JSON lines

logger = logging.getLogger(__name__)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The words of generate.py beside files and settings."""
    _add_prompts(parser)
    add = parser.add_argument
    add("--checkpoint", metavar="DIR", help="folder of a run or of one checkpoint")
    add("--step", type=int, metavar="N", help="which checkpoint of the run; default: the latest")
    add_number(parser, "--max-new-tokens", Settings.most, "tokens of a continuation at most")
    add_number(parser, "--seed", Settings.seed, "of what is drawn")
    add_number(parser, "--samples", Settings.samples, "continuations of each prompt")
    temperature = "0: always the likeliest token; default: %(default)s"
    add("--temperature", type=float, default=Sampling.temperature, metavar="T", help=temperature)
    add("--top-k", type=int, metavar="K", help="draw among the K likeliest tokens")
    top_p = "draw among the likeliest tokens that together have the probability P"
    add("--top-p", type=float, metavar="P", help=top_p)
    penalty = "divides the logits of tokens that the text has; default: 1, none"
    add("--repetition-penalty", type=float, default=1.0, metavar="X", help=penalty)
    stop = "end before this string; may be given several times; \\n is a line feed"
    add("--stop", action="append", default=[], metavar="TEXT", help=stop)
    add("--ignore-eod", action="store_true", help="go on behind the end of a document")
    add_number(parser, "--batch-size", Settings.batch, "texts that are continued together")
    add("--no-cache", action="store_true", help="compute everything again for each token")
    _add_attention(parser)


def _add_prompts(parser: argparse.ArgumentParser) -> None:
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


def _add_attention(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--window", metavar="W", help="key window: N, train_length or none")
    add("--sinks", metavar="N", help="first tokens that stay visible beside --window")
    clip = "tables by distance keep their value from D on"
    add("--clip-distance", metavar="D", help=clip)
    method = f"for longer texts: {', '.join(METHODS)} (docs/longer_texts.md)"
    add("--method", metavar="M", help=method)
    add("--logn-scale", choices=("off", "on"), help="key logn_scale")
    dtype = "of the model; tables stay float32"
    add("--dtype", choices=tuple(DTYPES), default="fp32", help=dtype)


@dataclass(frozen=True)
class Model:
    """What continues texts, and how. facts: what every row says about it"""

    trained: Trained
    tokenizer: Tokenizer
    settings: Settings
    facts: dict[str, Any]


def main(config: Config | None, arguments: argparse.Namespace) -> None:
    """Continue what is asked for, and write it where it is wanted."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")
    settings = settings_of(arguments)
    settings.check()
    check_places(arguments)
    prompts = [] if arguments.interactive else prompts_of(arguments)
    if here().ranks > 1:
        raise UserError("generate.py: is one process; start it without torchrun or srun")
    trained, tokenizer = opened_with_tokenizer(config, arguments.checkpoint, arguments.step)
    use_attention(trained, arguments)
    trained.model.to(here().device, DTYPES[arguments.dtype])
    use_threads(count_parameters(trained.model), here().device)
    model = Model(trained, tokenizer, settings, facts_of(trained, settings, arguments))
    if arguments.interactive:
        converse(model)
    elif len(prompts) == 1 and settings.samples == 1 and arguments.output is None:
        speed = Speed()
        stream(model, prompts[0], speed)
        report(model, speed)
    else:
        write_rows(model, prompts, arguments.output)


def check_places(arguments: argparse.Namespace) -> None:
    """UserError where prompts could not be read, or texts would be lost or replace a file."""
    if arguments.interactive:
        if arguments.prompt or arguments.prompt_file or arguments.prompts:
            raise UserError("--interactive: reads prompts from the terminal; leave the others out")
        if arguments.output is not None:
            raise UserError("--interactive: writes to the terminal; leave --output out")
    if sys.stdin is None and (arguments.interactive or FROM_STDIN in arguments.prompt):
        raise UserError("standard input: is closed; give --prompt TEXT or --prompt-file FILE")
    output = arguments.output
    if output is None and sys.stdout is None:
        raise UserError("standard output: is closed, and texts would be lost; give --output FILE")
    if output is not None:
        check_place(output)
        if output.exists() and output.stat().st_size:
            raise UserError(f"--output: {output} exists - name a new file, or remove this one")


def settings_of(arguments: argparse.Namespace) -> Settings:
    """The words of the command line."""
    sampling = Sampling(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        repetition_penalty=arguments.repetition_penalty,
    )
    return Settings(
        sampling,
        most=arguments.max_new_tokens,
        seed=arguments.seed,
        samples=arguments.samples,
        stops=[stop.replace("\\n", "\n").replace("\\t", "\t") for stop in arguments.stop],
        past_documents=arguments.ignore_eod,
        batch=arguments.batch_size,
        cached=not arguments.no_cache,
    )


def prompts_of(arguments: argparse.Namespace) -> list[str]:
    """All prompts that are given; UserError for none, and for files that are no text."""
    prompts = []
    for text in arguments.prompt:
        prompts.append(_from_stdin() if text == FROM_STDIN else _whole("--prompt", text))
    for path in arguments.prompt_file:
        prompts.append(_text_of("--prompt-file", path))
    if arguments.prompts is not None:
        prompts.extend(_lines_of(arguments.prompts))
    if prompts:
        return prompts
    if sys.stdin is None or sys.stdin.isatty():
        raise UserError(
            "--prompt: no prompt is given - write --prompt TEXT, --prompt-file FILE, --prompts FILE"
            " or --interactive, or send a text to standard input"
        )
    return [_from_stdin()]


def _from_stdin() -> str:
    return _whole("standard input", sys.stdin.read())


def _whole(source: str, text: str) -> str:
    """The text; UserError where it has bytes that are no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{source}: the prompt is not UTF-8 text; convert it first") from None
    return text


def _text_of(option: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise UserError(f"{option}: {path} cannot be read as text ({fault})") from None


def _lines_of(path: Path) -> Iterator[str]:
    """The prompts of a file, one in each line; empty lines are none."""
    lines = _text_of("--prompts", path).split("\n")
    filled = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not filled:
        raise UserError(f"--prompts: {path} has no line with a prompt")
    for number, line in filled:
        yield _prompt_in(line, f"{path}:{number}") if path.suffix == ".jsonl" else line


def _prompt_in(line: str, place: str) -> str:
    """The prompt of a JSON line: a string, or an object with it."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise UserError(f'--prompts: {place} is no JSON; write {{"prompt": "…"}}') from None
    if isinstance(value, dict):
        found = [value[key] for key in PROMPT_KEYS if key in value]
        value = found[0] if found else None
    if not isinstance(value, str):
        raise UserError(f'--prompts: {place} has no prompt; write {{"prompt": "…"}}')
    return value


def use_attention(trained: Trained, arguments: argparse.Namespace) -> None:
    """Compute attention as configuration and options say; UserError with all faults."""
    sinks, clip = arguments.sinks, arguments.clip_distance
    given = {"--sinks": [sinks] if sinks else [], "--clip-distance": [clip] if clip else []}
    check_words(given, [arguments.method] if arguments.method else [])
    changes: dict[str, Any] = {}
    if arguments.window is not None:
        changes |= {"window": window_of(arguments.window), "window_layers": ()}
    if arguments.logn_scale is not None:
        changes["logn_scale"] = arguments.logn_scale == "on"
    if sinks:
        changes["sinks"] = number_of(sinks)
    if clip:
        changes["clip_distance"] = number_of(clip)
    if arguments.method and arguments.method != "none":
        changes["method"] = arguments.method
    attention = AttentionSettings.of(trained.config.attention)
    trained.model.use_attention(replace(attention, **changes))


def facts_of(trained: Trained, settings: Settings, arguments: argparse.Namespace) -> dict[str, Any]:
    """What every row says about model and settings."""
    return {
        "checkpoint": str(trained.path),
        "step": trained.record["step"],
        "config_hash": trained.record["config_hash"],
        "seed": settings.seed,
        **asdict(settings.sampling),
        "max_new_tokens": settings.most,
        "dtype": arguments.dtype,
        **variant(trained.model.attention),
    }


def stream(model: Model, prompt: str, speed: Speed) -> None:
    """Write a continuation as it comes, and a line feed."""
    harmless = sys.stdout.isatty()
    for texts in _steps(model, [prompt], speed):
        for text in texts:
            assert text.written is not None
            piece = text.written.take()
            sys.stdout.write(piece.translate(NOT_FOR_TERMINALS) if harmless else piece)
            sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()


def _steps(model: Model, prompts: Sequence[str], speed: Speed) -> Iterator[list[Continuation]]:
    return continued(model.trained.model, model.tokenizer, prompts, model.settings, speed)


def converse(model: Model) -> None:
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
        speed = Speed()
        try:
            stream(model, _whole("prompt", line.removesuffix("\n")), speed)
        except KeyboardInterrupt:
            print()
        except UserError as fault:
            print(visible(str(fault)), file=sys.stderr)
            continue
        report(model, speed)


def write_rows(model: Model, prompts: Sequence[str], output: Path | None) -> None:
    """Write a JSON line for each continuation, in the order of the prompts.

    Where ctrl-C or a fault ends it, texts that are finished are written.
    """
    speed = Speed()
    rows: dict[tuple[int, int], dict[str, Any]] = {}
    try:
        for texts in _steps(model, prompts, speed):
            for text in texts:
                if text.ended is not None:
                    rows[text.number, text.sample] = row_of(model, prompts[text.number], text)
    finally:
        if rows:
            _write_lines([rows[key] for key in sorted(rows)], output)
    report(model, speed)


def _write_lines(rows: Sequence[dict[str, Any]], output: Path | None) -> None:
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    if output is None:
        sys.stdout.write("".join(lines))
        sys.stdout.flush()
    else:
        write_text(output, "".join(lines))
        logger.info("written to %s", output)


def row_of(model: Model, prompt: str, text: Continuation) -> dict[str, Any]:
    """What a JSON line says of a continuation."""
    assert text.written is not None
    assert text.ended is not None
    return {
        "prompt": prompt,
        "continuation": text.written.text,
        "prompt_number": text.number,
        "sample": text.sample,
        "prompt_tokens": len(text.prompt),
        "new_tokens": text.new,
        "ended": text.ended.value,
        **model.facts,
    }


def report(model: Model, speed: Speed) -> None:
    """Say how fast it was, of which checkpoint and with which seed."""
    facts = model.facts
    words = f"{facts['checkpoint']}, config {facts['config_hash']}, seed {facts['seed']}"
    logger.info("%s (%s)", speed, words)


def command() -> NoReturn:
    run(main, options=add_options, config_needed=False)


if __name__ == "__main__":
    command()
