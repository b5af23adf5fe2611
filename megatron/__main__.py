"""`megatron VERB …` starts the script of that name: `megatron sweep run FILE` is tools/sweep.py."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Become the script that the command line names."""
    paths = sorted([*ROOT.glob("*.py"), *ROOT.glob("tools/*.py")])
    scripts = {path.stem.replace("_", "-"): path for path in paths}
    verb = sys.argv[1] if len(sys.argv) > 1 else ""
    script = scripts.get(verb.replace("_", "-"))
    if script is None:
        sys.exit(f"usage: megatron VERB …, VERB one of {', '.join(scripts)}")
    os.execv(sys.executable, [sys.executable, str(script), *sys.argv[2:]])


if __name__ == "__main__":
    main()
