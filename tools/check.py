"""Test anybody's encoding: a rotation, a bias, scores or a model of transformers.

python tools/check.py mine:turn                     (q, k, positions) -> turned q and k
python tools/check.py mine:turn --as rotary --option base=500000
python tools/check.py mine:bias                     (heads, queries, keys) -> bias
python tools/check.py mine:scores                   (q, k) -> scores before softmax
python tools/check.py models/llama                  a folder of transformers, or mine:model

module:name is imported from this folder or an installed package, which runs its code. The exit
status is 1 if something fails.
"""

import json
import os
import pkgutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron.cli_errors import command_parser, guarded
from megatron.config.yaml_files import read_overrides
from megatron.conformance.anybody import examine_anything
from megatron.conformance.subject import FAILS, VERY_FAR, Subject, table
from megatron.errors import UserError
from megatron.evaluation.options import number


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    parser = command_parser(__doc__)
    add = parser.add_argument
    add("subject", help="module:name of a function or a model, or a model's folder")
    add("--as", dest="encoding", metavar="NAME", help="an encoding of ours that it should equal")
    add(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of that encoding, as in pos_emb_args; may be repeated",
    )
    size = number(2, 1024)
    add("--heads", type=size, default=4, help="default: %(default)s; a model has its own")
    add("--head-dim", type=size, default=64, help="default: %(default)s")
    add(
        "--length",
        type=number(256, 2**20),
        help=f"tokens of the longest text; default: {VERY_FAR}, or what a model names",
    )
    add("--json", action="store_true", help="print JSON in place of the table")
    arguments = parser.parse_args(argv)

    faults: list[str] = []
    options = read_overrides(arguments.option, faults.append)
    if faults or (options and not arguments.encoding):
        raise UserError(f"--option: {(faults or ['needs --as NAME'])[0]}; write --option key=value")
    subject = subject_called(arguments.subject)
    sizes = {"heads": arguments.heads, "head_dim": arguments.head_dim}
    like = Subject(arguments.encoding, options, **sizes) if arguments.encoding else None
    try:
        findings = examine_anything(subject, like, arguments.length, **sizes)
    except UserError as fault:
        raise UserError(f"{arguments.subject}: {fault}") from fault
    failed = sum(finding.verdict == FAILS for finding in findings)
    if arguments.json:
        print(json.dumps({"subject": arguments.subject, "findings": [*map(asdict, findings)]}))
    else:
        print(f"{arguments.subject}\n{table(findings)}\n{failed} fail")
    return int(failed > 0)


def subject_called(name: str) -> Any:
    """The object `module:name`, or the model of a folder, of which no code is run."""
    if Path(name).is_dir():
        import transformers

        transformers.logging.disable_progress_bar()
        try:
            return transformers.AutoModelForCausalLM.from_pretrained(
                name, local_files_only=True, trust_remote_code=False, use_safetensors=True
            )
        except (OSError, ValueError) as fault:
            raise UserError(f"{name}: transformers cannot load it: {fault}") from fault
    sys.path.insert(0, os.getcwd())
    try:
        return pkgutil.resolve_name(name)
    except Exception as fault:
        reason = f"{type(fault).__name__}: {fault}"
        raise UserError(
            f"{name}: is no folder, and no module:name in {os.getcwd()}: {reason}"
        ) from fault


if __name__ == "__main__":
    sys.exit(main())
