"""Documents, bytes and tokens of text, without writing anything.

python tools/count_tokens.py texts/ more.jsonl.zst --vocab-file vocab.json --merge-file merges.txt
python tools/count_tokens.py data/stdlib/stdlib_text_document

Text is read as prepare_data.py --input reads it. A prefix of token files is counted, too.
Tokens that end documents do not count.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from megatron.cli_errors import guarded
from megatron.commands.options.tokenizer import (
    add_tokenizer_options,
    given_tokenizer,
    tokenizer_of,
)
from megatron.data.count import Count, count_text, count_tokens, is_token_file, total
from megatron.data.inspect.words import table
from megatron.data.tokenizers.tokenizer import Tokenizer
from megatron.data.tokens import TokenFile
from megatron.errors import visible
from megatron.files import write_text

UNKNOWN = "?"


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    tokenizer = given_tokenizer(options)
    counts = [_counted(name, tokenizer, options.text_key) for name in options.files]
    shown = counts if len(counts) == 1 else [*counts, total(counts)]
    print(visible("\n".join(_lines(shown))))
    for one in counts:
        left_out = [f"{count:,} {reason}" for reason, count in one.skips.items()]
        if left_out:
            print(visible(f"left out of {one.name}: {', '.join(left_out)}"))
    if tokenizer is None and any(one.tokens is None for one in counts):
        print("tokens of text need a tokenizer: --vocab-file, or -t CharLevelTokenizer")
    if options.json:
        facts = [one.plain() for one in shown]
        write_text(options.json, json.dumps(facts, indent=1) + "\n")
    return 0


def _counted(name: str, tokenizer: Tokenizer | None, key: str) -> Count:
    if is_token_file(name):
        tokens = TokenFile.open(name)
        return count_tokens(tokens, tokenizer_of(tokens, [tokenizer]))
    return count_text(name, tokenizer, key=key)


def _lines(counts: Sequence[Count]) -> list[str]:
    body = []
    for one in counts:
        ratio = one.bytes_per_token
        body.append(
            [
                one.name,
                f"{one.documents:,}",
                UNKNOWN if one.text_bytes is None else f"{one.text_bytes:,}",
                UNKNOWN if one.tokens is None else f"{one.tokens:,}",
                UNKNOWN if ratio is None else f"{ratio:.3f}",
            ]
        )
    return table(["", "documents", "bytes", "tokens", "bytes per token"], body)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("files", nargs="+", metavar="FILE", help="files or folders of text, or token files")
    add_tokenizer_options(parser)
    add("--text-key", default="text", help="what holds the text (default: text)")
    add("--json", type=Path, metavar="FILE", help="the numbers as JSON")
    return parser
