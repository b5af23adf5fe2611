"""Verify the checkpoints of a run, or show what a token file contains.

python tools/inspect_files.py runs/mep                            a run's folder or one checkpoint
python tools/inspect_files.py data/text/text_text_document        lengths, some text

Every file of a checkpoint is compared with the size and SHA-256 that the checkpoint lists. Nothing
is unpickled or run. The exit status is 1 if anything is damaged.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from megatron.checkpoints.manifest import OPTIMIZER, Damaged, faults_of, read_record
from megatron.checkpoints.saved import folder_of, latest_step, leftovers, step_of, steps_in
from megatron.cli_errors import command_parser, guarded
from megatron.data.samples import split_in_words
from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokens import TokenFile
from megatron.errors import UserError, visible
from megatron.files import in_bytes
from megatron.splits import SPLIT

SHOWN = 200  # tokens of a document that are decoded


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    parser = command_parser(__doc__)
    add = parser.add_argument
    add("path", type=Path, metavar="FOLDER | PREFIX", help="token files without .bin and .idx")
    add("--split", default=SPLIT, help="of token files, as in the configuration: %(default)s")
    options = parser.parse_args(argv)
    if not options.path.is_dir():
        print(visible("\n".join(token_lines(TokenFile(options.path), options.split))))
        return 0
    lines, faults = checkpoint_lines(options.path)
    print(visible("\n".join([*lines, *faults])))
    return int(bool(faults))


def checkpoint_lines(folder: Path) -> tuple[list[str], list[str]]:
    """A line for each checkpoint, and what is wrong with them."""
    checkpoints, faults, last_lines = [folder], [], []
    if step_of(folder) is None:
        checkpoints = [folder_of(folder, step) for step in steps_in(folder)]
        last_lines.append(f"latest: step {latest_step(folder)}")
        last_lines += [f"left behind by a process that died: {path}" for path in leftovers(folder)]
    if not checkpoints:
        raise UserError(
            f"{folder}: has no checkpoint - name the folder of a run or of a checkpoint"
        )
    lines = []
    for path in checkpoints:
        wrong = faults_of(path)
        faults += wrong
        sizes = [file.stat().st_size for file in path.iterdir() if file.is_file()]
        try:
            record = read_record(path)
            use = "resuming" if OPTIMIZER in record["files"] else "evaluation"
            facts = {"config": record["config_hash"], "for": use}
        except Damaged:
            facts = {"config": "?", "for": "?"}
        line = {"step": step_of(path), "size": in_bytes(sum(sizes))}
        lines.append(line | facts | {"state": "damaged" if wrong else "verified"})
    table = pd.DataFrame(lines).to_string(index=False)
    return [table, *last_lines], faults


def token_lines(tokens: TokenFile, split: str) -> Iterator[str]:
    """The number of documents, their lengths, and the beginning of two of them."""
    writer = tokens.meta.get("tokenizer", {})
    yield f"{tokens.prefix} ({tokens.meta.get('corpus') or 'no card'})"
    kind = writer.get("type", "an unknown tokenizer (no card)")
    yield f"{len(tokens):,} documents, {tokens.tokens:,} tokens ({tokens.dtype}) of {kind}"
    sizes = tokens.sizes.astype(np.int64)
    end = tokens.end_of_documents()
    if end is not None:
        sizes = np.maximum(sizes - 1, 0)
        yield f"Each document ends with token {end}, which the lengths below don't include."
    total = max(sizes.sum(), 1)
    if size := tokens.text_bytes:
        yield f"The text has {size:,} bytes: {size / total:.2f} bytes per token."
    middle = f"median {np.median(sizes):,.0f}, mean {sizes.mean():,.0f}"
    yield f"Lengths: shortest {sizes.min():,}, {middle}, longest {sizes.max():,}"
    yield f"\n{split_in_words(tokens, split)}"

    tokenizer = None
    beside = tokens.prefix.with_name("tokenizer.json")
    if beside.exists():
        tokenizer = build_tokenizer(writer.get("type", "HFTokenizer"), beside)
    for document in sorted({0, len(tokens) - 1}):
        yield f"\n--- document {document:,}, {tokens.sizes[document]:,} tokens, begins with ---"
        ids = tokens.read(document, 0, SHOWN).tolist()
        yield tokenizer.decode(ids) if tokenizer else " ".join(map(str, ids))


if __name__ == "__main__":
    sys.exit(main())
