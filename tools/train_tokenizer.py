"""Train a byte-level BPE, as GPT-2's is, on your own text or on a corpus that is known by name.

python tools/train_tokenizer.py pure_python --vocab-size 8192 -o tokenizers/tokenizer.json
python tools/train_tokenizer.py --input texts more.jsonl.zst --vocab-size 32000 -o mine.json

The same text gives the same tokenizer.
"""

import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

from megatron.cli_errors import command_parser, guarded
from megatron.data.corpora.recipes import corpus_names, named
from megatron.data.prepare import TRAINING_CHARACTERS, training_texts
from megatron.data.readers import Files
from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokenizers.train import train_tokenizer
from megatron.errors import UserError
from megatron.files import check_output, write_output


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    parser = command_parser(__doc__)
    add = parser.add_argument
    add("corpus", nargs="?", help=f"a corpus known by name: {', '.join(corpus_names())}")
    add("--input", type="path", nargs="+", metavar="FILE", help="your own text, or folders of it")
    add(
        "--text-key",
        action="append",
        metavar="KEY",
        help="key of the text in JSON lines (default: text); of several, the first that an entry"
        " has",
    )
    add(
        "-d",
        "--data-dir",
        type=Path,
        default=Path("data"),
        help="folder of the data (default: data)",
    )
    add("--vocab-size", type=int, required=True, help="entries, such as 8192")
    add(
        "--characters",
        type=int,
        default=TRAINING_CHARACTERS,
        help="characters to learn from at most (default: %(default)s)",
    )
    add(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help="the new tokenizer.json",
    )
    add("--overwrite", action="store_true", help="replace an earlier file of this name")
    options = parser.parse_args(argv)
    output: Path = options.output
    if output.suffix != ".json":
        raise UserError(f"-o: {output} does not end with .json, as a tokenizer.json - rename it")
    mark = b'"ByteLevel"' if options.overwrite else None
    check_output(output, mark)
    if options.characters < 1:
        raise UserError(f"--characters: {options.characters} is no text - use 1 or more")
    if bool(options.corpus) == bool(options.input):
        raise UserError(
            "train_tokenizer.py: what is it to learn from? - name a corpus (pure_python), or give"
            " --input FILE"
        )
    if options.corpus:
        corpus = named(options.corpus, options.data_dir)
    else:
        corpus = Files("input", options.input, options.text_key or ["text"])

    texts = training_texts(corpus, options.characters)
    first = next(texts, "")
    if not first:
        raise UserError(f"{corpus.name}: has no text to learn from - give files with text")
    text = train_tokenizer(chain([first], texts), options.vocab_size)
    with TemporaryDirectory() as folder:
        temporary = Path(folder, "tokenizer.json")
        temporary.write_text(text, encoding="utf-8")
        tokenizer = build_tokenizer("HFTokenizer", temporary)
    write_output(output, text.encode(), mark)
    print(f"{output}: HFTokenizer {tokenizer.hash}, {tokenizer.vocab_size:,} entries")
    print(f"in your YAML:\n  tokenizer_type: HFTokenizer\n  vocab_file: {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
