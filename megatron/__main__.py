"""`megatron VERB …` starts the script of that name: `megatron sweep run FILE` is tools/sweep.py."""

import os
import sys
from pathlib import Path

from megatron.errors import did_you_mean

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Become the script that the command line names."""
    paths = sorted([*ROOT.glob("*.py"), *ROOT.glob("tools/*.py")])
    scripts = {path.stem.replace("_", "-"): path for path in paths}
    if not (ROOT / "train.py").is_file():
        sys.exit(
            "megatron: the commands are scripts of the project's folder - run"
            " pip install -e '.[train]' there"
        )
    words = sys.argv[1:]
    verb = words[0].replace("_", "-") if words else ""
    if verb not in scripts:
        verbs = ", ".join(scripts)
        usage = f"usage: megatron VERB …, VERB one of {verbs}\n{did_you_mean(verb, scripts)}"
        sys.exit(usage.strip())
    script = str(scripts[verb])
    os.execv(sys.executable, [sys.executable, script, *words[1:]])


if __name__ == "__main__":
    main()
