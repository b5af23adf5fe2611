"""Pages of docs/results whose tables are the output of the commands above them."""

import glob
import re
from pathlib import Path

import pytest

from tests.support import ROOT
from tools import claims, compare, show_results

COMMAND = re.compile(
    r"^    python tools/(claims|compare|show_results)\.py (.+)\n[^#]*(?=\n## |\Z)", re.M
)


def rewritten(page: Path, output: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The page with the output of each section's last command, up to the next section."""

    def with_output(found: re.Match[str]) -> str:
        tool, line = found.groups()
        words = [path for word in line.split() for path in sorted(glob.glob(word)) or [word]]
        if tool in ("claims", "compare"):
            main = claims.main if tool == "claims" else compare.main
            output.unlink(missing_ok=True)
            assert main([*words, "-o", str(output)]) == 0
            table = re.sub("<!--.*-->", "", output.read_text(encoding="utf-8"))
        else:
            capsys.readouterr()
            assert show_results.main(words) == 0
            table = capsys.readouterr().out
        return f"    python tools/{tool}.py {line}\n\n{table.strip()}\n"

    return COMMAND.sub(with_output, page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["claims.md", "context.md"])
def test_every_table_of_the_page_is_what_its_command_writes(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    page = ROOT / "docs/results" / name
    text = page.read_text(encoding="utf-8")
    assert len(COMMAND.findall(text)) >= text.count("\n    python tools/claims.py") > 0
    again = rewritten(page, tmp_path / "claims.md", capsys)
    assert again == text, "write it again: the output of each command goes below it"
