"""Print the syntax nodes of the core; exit with 1 above the limit that docs/design.md names.

python -m tests.count_nodes
"""

import ast
import re
import sys

from tests.support import ROOT


def count() -> int:
    """Nodes of `megatron`, `tools` and the scripts at the top, without `megatron/hybrids`."""
    paths = [*ROOT.glob("*.py"), *ROOT.glob("tools/**/*.py"), *ROOT.glob("megatron/**/*.py")]
    core = [path for path in paths if ROOT / "megatron/hybrids" not in path.parents]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in core]
    return sum(len(list(ast.walk(tree))) for tree in trees)


if __name__ == "__main__":
    design = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    (limit,) = re.findall(r"at most ([\d,]+) syntax nodes", design)
    nodes = count()
    print(f"{nodes:,} syntax nodes, at most {limit}")
    if nodes > int(limit.replace(",", "")):
        sys.exit("docs/design.md: the core has grown - remove something, or raise the limit there")
