"""Write the packages that are installed here into configs/corpora/environment.yml.

python tools/fix_environment.py    after a change of constraints.txt
"""

import sys

from megatron.cli_errors import guarded
from megatron.data.corpora.recipes import RECIPES, read_recipe
from megatron.data.corpora.source_code import describe
from megatron.files import write_text

HEADING = "packages:\n"


@guarded
def main() -> int:
    path = RECIPES / "environment.yml"
    parts = {name: fixed.part for name, fixed in read_recipe("environment").packages.items()}
    entries = []
    for package, facts in describe(parts).items():
        values = ", ".join(f"{key}: {value}" for key, value in facts.items())
        entries.append(f"  {package}: {{{values}}}\n")
    before, _, _ = path.read_text(encoding="utf-8").partition(HEADING)
    write_text(path, before + HEADING + "".join(entries))
    print(f"{path}: {len(entries)} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
