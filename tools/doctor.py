"""Whether this machine can run a training: every finding with what to do about it.

python tools/doctor.py [--save runs] [--data data] [--json]

It looks at Python and the packages, torch, GPU and driver, triton and its compiler, a wrong apex,
threads, disks, /dev/shm, locks of interrupted builds, and the network inside this machine. Nothing
is changed or sent. The status is 1 where something would stop a run, else 0.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.cli_errors import guarded
from megatron.doctor.examine import examined
from megatron.doctor.finding import Finding
from megatron.errors import visible


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    findings = examined(options.save, options.data)
    stopping = [finding for finding in findings if finding.level == "stops"]
    if options.json:
        records = [finding.record() for finding in findings]
        print(json.dumps({"ready": not stopping, "findings": records}, indent=2))
    else:
        print(visible(report(findings)))
    return int(bool(stopping))


def report(findings: Sequence[Finding]) -> str:
    """A line for each finding, and one with their number."""
    counts = {level: 0 for level in ("stops", "warning")}
    for finding in findings:
        if finding.level in counts:
            counts[finding.level] += 1
    verdict = "would stop a run" if counts["stops"] else "nothing would stop a run"
    number = f"{counts['stops']} finding(s) " if counts["stops"] else ""
    lines = [str(finding) for finding in findings]
    return "\n".join([*lines, f"{number}{verdict}, {counts['warning']} warning(s)"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--save", type=Path, default=Path("runs"), metavar="DIR", help="folder for checkpoints")
    add("--data", type=Path, default=Path("data"), metavar="DIR", help="folder of token files")
    add("--json", action="store_true", help="print JSON: {ready, findings}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
