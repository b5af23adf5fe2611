"""Test one encoding for the properties that all must have; exit status 1 if something fails.

python tools/check_encoding.py kerple_log
python tools/check_encoding.py mep --option "kernels=[exp, kerple_log]" --option weights=learned
python tools/check_encoding.py bump --from my_encoding.py --heads 12 --head-dim 64
"""

import logging
import sys
from collections.abc import Sequence
from textwrap import fill

from megatron.cli_errors import command_parser, guarded
from megatron.config.yaml_files import read_overrides
from megatron.conformance.checks import examine
from megatron.conformance.subject import FACT, FAILS, HOLDS, NOT_APPLICABLE, Finding, Subject
from megatron.errors import UserError
from megatron.evaluation.options import number
from megatron.positions import load_file

LEGEND = (
    f"{HOLDS}: holds · {FAILS}: must hold and does not"
    f" · {FACT}: does not hold, which is no fault · {NOT_APPLICABLE}: does not apply"
)


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    parser = command_parser(__doc__)
    add = parser.add_argument
    add("name", help="the encoding, as in pos_emb")
    user_file = "a Python file of yours that registers encodings"
    add("--from", dest="file", type="path", metavar="FILE", help=user_file)
    option = "an option of the encoding, as in pos_emb_args; may be repeated"
    add("--option", action="append", default=[], metavar="KEY=VALUE", help=option)
    size = number(1, 1024)
    add("--heads", type=size, default=Subject.heads, help="number of heads")
    add("--head-dim", type=size, default=Subject.head_dim, help="features per head")
    length = "seq_length of the model; most checks use texts of this length"
    add("--train-length", type=number(32, 2**17), default=Subject.train_length, help=length)
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.ERROR)

    sizes = (arguments.heads, arguments.head_dim, arguments.train_length)
    faults: list[str] = []
    options = read_overrides(arguments.option, faults.append)
    if faults:
        raise UserError(f"--option: {faults[0]}; write --option key=value")
    if arguments.file:
        load_file(arguments.file)
    findings = examine(Subject(arguments.name, options, *sizes))
    shown = ", ".join(f"{key}: {value}" for key, value in options.items())
    title = f"{arguments.name} {{{shown}}}" if options else arguments.name
    shape = "{} heads of {}, trained at {} tokens".format(*sizes)
    return report(f"{title}, {shape}", findings)


def report(heading: str, findings: Sequence[Finding]) -> int:
    """Print the findings, and what the verdicts mean; 1 if one fails, else 0."""
    print(heading)
    width = max(len(finding.check) for finding in findings)
    for finding in findings:
        line = f"  {finding.verdict:4}  {finding.check:{width}}  {finding.detail}"
        print(fill(line, 120, subsequent_indent=" " * (width + 10)))
    print(LEGEND)
    verdicts = [finding.verdict for finding in findings]
    failed = verdicts.count(FAILS)
    end = "" if failed else ": the encoding keeps what it must"
    print(f"{verdicts.count(HOLDS)} hold, {failed} fail{end}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
