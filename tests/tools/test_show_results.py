"""Several runs in one table and one plot."""

from tests.support import ROOT, run


def test_results_of_several_files_come_in_one_table_and_one_plot(tmp_path):
    demo = ROOT / "docs" / "demo.jsonl"
    lines = demo.read_text().splitlines(keepends=True)
    for name in ("mep_free", "rotary"):
        (tmp_path / f"{name}.jsonl").write_text("".join(line for line in lines if f'"{name}"' in line))
    plot = tmp_path / "plot.svg"
    done = run("tools/show_results.py", tmp_path / "mep_free.jsonl", tmp_path / "rotary.jsonl", "-o", plot)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[2:4]] == ["mep_free", "rotary"]
    assert "mep_free" in plot.read_text()


def test_a_file_that_holds_something_else_is_one_message(tmp_path):
    (tmp_path / "a.jsonl").write_text("{}\n")
    done = run("tools/show_results.py", tmp_path / "a.jsonl")
    assert done.returncode == 1
    assert "is no result of evaluate.py" in done.stderr
    assert "Traceback" not in done.stderr
