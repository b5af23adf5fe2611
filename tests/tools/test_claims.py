"""The page of papers' claims: every table is what its command writes."""

import re

from tests.support import ROOT
from tools.claims import MARK, main

PAGE = ROOT / "docs/results/claims.md"
COMMAND = re.compile(r"^    python tools/claims.py (.+)$", re.MULTILINE)


def test_every_table_of_the_page_is_what_its_command_writes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    page = PAGE.read_text(encoding="utf-8")
    commands = COMMAND.findall(page)
    assert len(commands) == page.count("\n## ")
    for words in commands:
        output = tmp_path / "claims.md"
        assert main([*words.split(), "-o", str(output)]) == 0
        table = output.read_text(encoding="utf-8").removeprefix(MARK.decode())
        assert f"    python tools/claims.py {words}{table}" in page, f"write again: {words}"
    assert "would decide" in capsys.readouterr().out
