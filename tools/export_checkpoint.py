"""Write a checkpoint as a folder that Hugging Face's transformers loads.

python tools/export_checkpoint.py RUN --to hf -o FOLDER [--step N]

RUN is the folder of a run or of a checkpoint. If the model equals one of transformers' classes, it
is written as that class. Otherwise the folder includes the model's code, which needs only torch and
transformers. We compare the logits with ours before the folder gets its final name. A run with a
pos_emb_file needs that file: --from my_encoding.py.
"""

import os
import sys
import tempfile
from pathlib import Path

from megatron.cli_errors import command_parser, guarded
from megatron.errors import visible
from megatron.interop.export import export
from megatron.positions import load_file


@guarded
def main(argv: list[str] | None = None) -> int:
    parser = command_parser(__doc__)
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="folder of a run or of a checkpoint")
    add("--to", choices=["hf"], required=True, help="hf: Hugging Face's transformers")
    add("-o", "--output", type=Path, required=True, metavar="FOLDER", help="the new folder")
    add("--step", type=int, metavar="N", help="which checkpoint of the run; default: the latest")
    add(
        "--from",
        dest="file",
        type="path",
        metavar="FILE",
        help="your own file with the encoding, as in pos_emb_file",
    )
    options = parser.parse_args(argv)

    if options.file:
        load_file(options.file)
    print(f"writing {options.output}, and comparing its logits with ours", flush=True)
    with tempfile.TemporaryDirectory() as modules:
        # transformers reads both when it is imported: then it uses no network, and leaves no copy
        # of the model's code behind.
        os.environ["HF_HUB_OFFLINE"] = "1"
        os.environ.setdefault("HF_MODULES_CACHE", modules)
        exported = export(options.run, options.output, step=options.step)
    lines = [f"{options.output}: {exported.architecture}, step {exported.step}"]
    for length, difference in exported.differences.items():
        lines.append(f"logits at {length} tokens: within {difference:.1e} of ours")
    print(visible("\n".join([*lines, *exported.notes])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
