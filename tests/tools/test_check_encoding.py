"""The command prints every finding in plain words, and its exit status says whether one fails."""

import pytest

from megatron.conformance.checks import CHECKS, examine, later_tokens_change_nothing, title
from megatron.conformance.subject import FAILS, HOLDS, Finding
from tools import check_encoding as command
from tools.check_encoding import main, report

pytestmark = pytest.mark.usefixtures("own_registry")


@pytest.fixture
def quick(monkeypatch):
    """Only some checks: the command prints what they find and does no more."""
    some = (*CHECKS[:6], later_tokens_change_nothing)
    monkeypatch.setattr(command, "examine", lambda subject, _: examine(subject, some))


def test_every_check_fits_on_a_line(capsys):
    titles = [title(check) for check in CHECKS]
    assert len(set(titles)) == len(titles)
    report("none", [Finding(HOLDS, "largest difference 1.2e-07", text) for text in titles])
    lines = capsys.readouterr().out.splitlines()
    for text in titles:
        assert [line for line in lines if text in line and "1.2e-07" in line]


def test_the_report_names_options_shape_verdicts_and_the_end(quick, capsys):
    shape = ["--heads", "2", "--head_dim", "16", "--train_length", "128"]
    assert main(["alibi", "--option", "slope_factor=0.5", *shape]) == 0
    printed = capsys.readouterr().out
    for words in (
        "alibi {slope_factor: 0.5}, 2 heads of 16, trained at 128 tokens",
        "Scores depend on the distance alone",
        "FAIL: must hold but does not",
        "7 hold, 0 fail: the encoding has all properties that it must have",
    ):
        assert words in printed


LENGTH_DEPENDENT = """
from megatron.positions import DistanceBias, register


@register("falling")
class Falling(DistanceBias):
    '''-d / length'''

    def log_kernel(self, distance):
        return (-distance / len(distance)).expand(self.shape.heads, -1)
"""


def test_a_failure_is_printed_and_is_the_exit_status(quick, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(LENGTH_DEPENDENT)
    assert main(["falling", "--from", str(tmp_path / "mine.py")]) == 1
    printed = capsys.readouterr().out
    assert FAILS in printed
    assert "6 hold, 1 fail\n" in printed


def test_lack_of_memory_is_no_fault_of_the_encoding(monkeypatch, capsys):
    def check(subject):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(command, "examine", lambda subject, _: examine(subject, [check]))
    assert main(["alibi"]) == 1
    printed = capsys.readouterr()
    assert "the machine is out of memory" in printed.err
    assert printed.out == ""
