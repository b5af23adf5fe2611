"""Compare encodings with 95 % intervals, or test claims about them.

python tools/compare.py A.jsonl B.jsonl … [--against NAME] [-o out.md]
python tools/compare.py A.jsonl B.jsonl … --claims FILE [-o out.md]

It pairs losses of the same targets, as evaluate.py wrote them; the first encoding is the reference.
From three common seeds on, differences are tested over seeds. With fewer, intervals hold for these
weights on this text, and nothing is marked as significant.

A file of claims is YAML: `source` (paper, section, url) and `claims`. Each claim holds, fails, is
undecided, where the sample that would decide is named, or has no rows. The file of -o also lists
the runs and commits of each claim's rows.

"""

import sys
from pathlib import Path

from megatron.cli_errors import command_parser, guarded
from megatron.errors import UserError
from megatron.files import write_output
from megatron.results.claims import FIELDS, judged, read_claims, table_of, table_of_origins
from megatron.results.comparison import compared
from megatron.results.comparison_table import tables
from megatron.results.effective_length import tables_of_effective_lengths
from megatron.results.files import read_rows
from megatron.results.labels import kinds
from megatron.results.row import TASK

MARKS = {"markdown": "<!-- by tools/compare.py -->", "latex": "% by tools/compare.py"}


@guarded
def main(argv: list[str] | None = None) -> int:
    parser = command_parser(f"{__doc__}{FIELDS}")
    add = parser.add_argument
    add("results", type=Path, nargs="+", metavar="FILE", help="JSON lines that evaluate.py wrote")
    add(
        "--against", metavar="NAME", help="reference of the comparison; default: the first encoding"
    )
    add("--claims", type="path", metavar="FILE", help="a .yml, or a name in configs/claims")
    add("-o", "--output", type=Path, metavar="FILE", help="a .md or a .tex to write too")
    options = parser.parse_args(argv)
    output = options.output
    if output and output.suffix not in (".md", ".tex"):
        raise UserError(f"--output: {output} is no .md and no .tex - name it so")
    source, claims = read_claims(options.claims) if options.claims else ("", [])
    rows = read_rows(options.results)
    appendix = []  # what only the file shows
    if claims:
        verdicts = judged(claims, rows)
        written = table_of(verdicts, source).written
        appendix = [table_of_origins(verdicts)]
    elif any(row.get("protocol") == TASK for row in rows):
        raise UserError(
            "compare.py: rows of tasks have accuracies, and losses are compared here - leave their"
            " files out, or use --claims"
        )
    else:
        comparisons = compared(kinds(rows), options.against)
        effective = tables_of_effective_lengths(rows)

        def written(form: str) -> str:
            more = [table.written(form) for table in effective]
            return "\n\n\n".join([tables(comparisons, form), *more])

    if output:
        form = "latex" if output.suffix == ".tex" else "markdown"
        mark = MARKS[form]
        parts = [mark, written(form), *(table.written(form) for table in appendix)]
        write_output(output, ("\n\n".join(parts) + "\n").encode(), mark.encode())
    print(written("text"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
