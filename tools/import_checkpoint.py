"""Import a checkpoint of Hugging Face, GPT-NeoX or another trainer as a run.

python tools/import_checkpoint.py EleutherAI/pythia-70m -o runs/pythia
python tools/import_checkpoint.py models/qwen3 -o runs/qwen3 --tokenizer tokenizer.json
python tools/import_checkpoint.py neox/global_step143000 train.yml model.yml -o runs/neox

SOURCE is a folder of Hugging Face's (GPT-NeoX, GPT-2, Llama, Mistral, Qwen 2, 3, 3-Next, 3.5,
SmolLM3) or a model on its hub, a folder that export_checkpoint.py wrote, a checkpoint of GPT-NeoX,
KERPLE or MEP, or one of nanoGPT, litgpt, torchtitan or flame. None of its code is run. Checksums of
an exported folder are verified first. A Hugging Face model is compared with transformers' own class
before anything is written.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.cli_errors import command_parser, guarded
from megatron.config import load
from megatron.entry import print_notes, settings_first, split_words
from megatron.errors import visible
from megatron.interop.importing import import_checkpoint
from megatron.interop.reference import ONE_STAGE
from megatron.positions import load_file


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    parser = command_parser(__doc__)
    add = parser.add_argument
    add(
        "source",
        type="path",
        metavar="SOURCE",
        help="a folder, or owner/model on the Hugging Face hub",
    )
    add(
        "words",
        nargs="*",
        metavar="FILE | key=value",
        help="the configuration of a checkpoint of GPT-NeoX (its folder `configs`), torchtitan or"
        " flame",
    )
    add("-o", "--output", type=Path, required=True, metavar="RUN", help="the new run's folder")
    add(
        "--tokenizer",
        type=Path,
        metavar="FOLDER_OR_FILE",
        help="use this tokenizer: a tokenizer.json, or a folder with it or with GPT-2's two files",
    )
    add(
        "--from",
        dest="file",
        type="path",
        metavar="FILE",
        help="your own file with the export's encoding, as in pos_emb_file",
    )
    options = parser.parse_intermixed_args(settings_first(argv) if argv is not None else None)

    if options.file:
        load_file(options.file)
    config = None
    if options.words:
        files, overrides = split_words(options.words)
        config = load(files, [ONE_STAGE, *overrides])
        print_notes(config.notes)
    imported = import_checkpoint(
        options.source, options.output, tokenizer=options.tokenizer, config=config
    )
    compared = imported.compared
    agreement = f"logits not compared: {compared.get('reason')}"
    if "reason" not in compared:
        agreement = (
            f"logits within {compared['largest_difference']:.2g} of {compared['with']}"
            f" (the largest is {compared['largest_logit']:.3g})"
        )
    lines = [f"note: {note}" for note in imported.notes]
    written = f"written to {imported.path} (config {imported.config.hash})"
    print(visible("\n".join([*lines, agreement, written])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
