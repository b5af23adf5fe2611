"""Check the properties that every encoding must have, or draw an encoding.

python tools/check_encoding.py kerple_log
python tools/check_encoding.py mep --option "kernels=[exp, kerple_log]" --option weights=learned
python tools/check_encoding.py bump --from my_encoding.py --plot bump.svg
python tools/check_encoding.py runs/mep --plot learned.png    what a checkpoint has learned

The exit status is 1 if a check fails.
"""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.checkpoints.read import load_for_evaluation
from megatron.cli_errors import command_parser, guarded
from megatron.config.yaml_files import read_overrides
from megatron.conformance.checks import CHECKS, examine
from megatron.conformance.subject import (
    FACT,
    FAILS,
    HOLDS,
    NOT_APPLICABLE,
    Finding,
    Subject,
    table,
)
from megatron.errors import UserError
from megatron.evaluation.options import number
from megatron.positions import REGISTRY, load_file

LEGEND = (
    f"{HOLDS}: holds · {FAILS}: must hold but does not · {FACT}: does not hold, but need not ·"
    f" {NOT_APPLICABLE}: does not apply"
)
DRAWN = {"heads": 12, "head_dim": 64, "train_length": 512}  # the shape of the papers' models


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    parser = command_parser(__doc__)
    add = parser.add_argument
    add("name", help="the encoding, as in pos_emb; with --plot also the folder of a run")
    add(
        "--from",
        dest="file",
        type="path",
        metavar="FILE",
        help="your own Python file that registers encodings",
    )
    add(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of the encoding, as in pos_emb_args; may be repeated",
    )
    size = number(1, 1024)
    add("--heads", type=size, help=f"default: {Subject.heads}, or 12 for a picture")
    add("--head-dim", type=size, help=f"default: {Subject.head_dim}, or 64 for a picture")
    add(
        "--train-length",
        type=number(32, 2**17),
        help=f"seq_length of the model; default: {Subject.train_length}, or 512 for a picture",
    )
    add(
        "--plot",
        type=Path,
        metavar="PICTURE",
        help="draw the encoding instead, as .png, .svg or .pdf",
    )
    add(
        "--length",
        type=number(2, 2**20),
        default=16384,
        help="distances to draw; default: %(default)s",
    )
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.ERROR)

    faults: list[str] = []
    options = read_overrides(arguments.option, faults.append)
    if faults:
        raise UserError(f"--option: {faults[0]}; write --option key=value")
    if arguments.file:
        load_file(arguments.file)
    shape = {key: value for key in DRAWN if (value := getattr(arguments, key))}
    if arguments.plot:
        shape = DRAWN | shape
    subject = Subject(arguments.name, options, **shape)
    shown = ", ".join(f"{key}: {value}" for key, value in options.items())
    title = f"{arguments.name} {{{shown}}}" if options else arguments.name
    if not arguments.plot:
        sizes = f"{subject.heads} heads of {subject.head_dim}"
        heading = f"{title}, {sizes}, trained at {subject.train_length} tokens"
        subject.position()  # a wrong name or option is no finding
        return report(heading, examine(subject, CHECKS))

    from megatron.report.curves import write  # matplotlib, which checks don't need
    from megatron.report.encoding_figures import NO_PICTURE, draw, panels

    positions = {}
    if arguments.name not in REGISTRY and Path(arguments.name).is_dir():
        model, config, meta = load_for_evaluation(arguments.name)
        for placed in model.placed:
            label = f", {placed.label}" if len(model.placed) > 1 else ""
            positions[f"{config.label}{label}, step {meta['step']}"] = placed.position
    else:
        positions[title] = subject.position()
    for count, (title, position) in enumerate(positions.items()):
        drawn = panels(position, arguments.length)
        path = arguments.plot
        if count:
            path = path.with_stem(f"{path.stem}-{count}")
        if drawn:
            write(draw(drawn, title), path)
        print(f"{title}: {path if drawn else NO_PICTURE}")
    return 0


def report(heading: str, findings: Sequence[Finding]) -> int:
    """Print the findings and what the verdicts mean; return 1 if a check fails, else 0."""
    print(heading)
    print(table(findings, columns=120))
    print(LEGEND)
    verdicts = [finding.verdict for finding in findings]
    failed = verdicts.count(FAILS)
    end = "" if failed else ": the encoding has all properties that it must have"
    print(f"{verdicts.count(HOLDS)} hold, {failed} fail{end}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
