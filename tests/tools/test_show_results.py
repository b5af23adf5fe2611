"""Several runs in one table and one plot."""

from tests.support import ROOT
from tools.show_results import main

RESULTS = ROOT / "docs" / "results"


def test_results_come_in_one_table_and_one_plot(tmp_path, capsys):
    plot = tmp_path / "plot.svg"
    assert main([str(ROOT / "docs/demo.jsonl"), "-o", str(plot)]) == 0
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines()[3:5]] == ["mep_free", "rotary"]
    assert "mep_free" in plot.read_text()
    words = [str(RESULTS / "cpu-environment.jsonl"), "--over-seeds", "-o", str(plot)]
    assert main(words) == 0
    assert "rotary: 101.9" in plot.read_text()
    assert "seed 123" not in plot.read_text()
    capsys.readouterr()
    assert main([str(RESULTS / "cpu-environment-protocols.jsonl"), "-o", str(plot)]) == 0
