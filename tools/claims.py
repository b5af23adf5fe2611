"""Claims about encodings, and what results say of each: holds, fails, undecided or no rows.

python tools/claims.py FILE RESULTS… [-o out.md]

FILE is YAML, or the name of one in configs/claims: `source` (paper, section, url) and `claims`.
From three common seeds on, a claim is tested over seeds, with fewer over blocks of the text, which
is about these weights only. For what is undecided, the sample that would decide is named.

"""

import sys
from pathlib import Path

from megatron.cli_errors import command_parser, guarded
from megatron.errors import UserError
from megatron.files import ROOT, write_output
from megatron.results.claims import FIELDS, judged, read_claims, table_of
from megatron.results.files import read_rows

MARK = b"<!-- by tools/claims.py -->"
SHIPPED = ROOT / "configs" / "claims"


@guarded
def main(argv: list[str] | None = None) -> int:
    parser = command_parser(f"{__doc__}{FIELDS}")
    parser.add_argument("file", type="path", help="a .yml, or a name in configs/claims")
    parser.add_argument("results", type=Path, nargs="+", help="JSON lines of evaluate.py")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="a Markdown file to write too"
    )
    options = parser.parse_args(argv)
    shipped = {path.stem: path for path in sorted(SHIPPED.glob("*.yml"))}
    path = shipped.get(options.file) or Path(options.file)
    if not path.exists():
        names = ", ".join(shipped)
        raise UserError(f"{path}: there is no such file of claims - configs/claims has {names}")
    source, claims = read_claims(path)
    table = table_of(judged(claims, read_rows(options.results)), source)
    print(table.text())
    if options.output:
        content = MARK + f"\n\n{table.markdown()}\n".encode()
        write_output(options.output, content, MARK)
    return 0


if __name__ == "__main__":
    sys.exit(main())
