"""`megatron NAME …` starts the script of that name: `megatron sweep run FILE` is tools/sweep.py."""

import os
import sys
from pathlib import Path

from megatron.cli_errors import purpose
from megatron.errors import did_you_mean

ROOT = Path(__file__).resolve().parents[1]
GROUPS = {
    "data": ("prepare-data", "inspect-files", "merge-data"),
    "train": ("explain-config", "train", "deepy", "sweep"),
    "measure": ("evaluate", "generate", "check-encoding", "check", "bench"),
    "compare": ("compare", "show-results", "reproduce"),
    "exchange": ("import-checkpoint", "export-checkpoint"),
}


def main() -> None:
    """Become the script that the command line names, or list all scripts."""
    paths = [*ROOT.glob("*.py"), *ROOT.glob("tools/*.py")]
    scripts = {path.stem.replace("_", "-"): path for path in paths}
    if "train" not in scripts:
        sys.exit(
            "megatron: the commands are scripts in the project's folder - run"
            " pip install -e '.[train]' there"
        )
    words = sys.argv[1:]
    name = words[0].replace("_", "-") if words else "--help"
    if name in ("--help", "-h"):
        lines = ["usage: megatron COMMAND …    (megatron COMMAND --help shows its options)"]
        for group, commands in GROUPS.items():
            lines += ["", group]
            for command in commands:
                lines.append(f"  {command:18} {purpose(scripts[command])}")
        sys.stdout.write("\n".join(lines) + "\n")
        return
    if name not in scripts:
        hint = did_you_mean(name, scripts) or "`megatron --help` lists the commands"
        sys.exit(f"megatron: there is no command {words[0]} - {hint}")
    script = str(scripts[name])
    os.execv(sys.executable, [sys.executable, script, *words[1:]])


if __name__ == "__main__":
    main()
