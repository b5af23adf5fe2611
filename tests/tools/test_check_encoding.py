"""The command prints every finding in plain words, and its exit status says whether one fails."""

import pytest
from safetensors.torch import load_file, save_file

from megatron.conformance.checks import CHECKS, title
from megatron.conformance.subject import FAILS, HOLDS, Finding
from megatron.positions import REGISTRY
from tests.tools.test_plot_positions import checkpoint
from tools.check_encoding import main, report

pytestmark = pytest.mark.usefixtures("own_registry")


@pytest.fixture
def quick(monkeypatch):
    """Only the first checks: the command prints what they find and does no more."""
    from megatron.conformance.checks import examine
    from tools import check_encoding as command

    monkeypatch.setattr(command, "examine", lambda subject: examine(subject, CHECKS[:7]))


def test_every_check_fits_on_a_line(capsys):
    titles = [title(check) for check in CHECKS]
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
        HOLDS,
        "FAIL: must hold and does not",
        "7 hold, 0 fail: the encoding keeps what it must",
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


def trained(folder, stored, *words):
    """A run whose checkpoint stores other numbers: values by head for each parameter."""
    checkpoint(folder, *words)
    file = folder / "global_step10" / "model.safetensors"
    weights = load_file(file)
    for name, values in stored.items():
        for head, value in values.items():
            weights[name][head] = value
    save_file(weights, file)
    return ["--checkpoint", str(folder)]


def test_numbers_of_a_checkpoint_that_left_the_region_are_named_by_head_and_layer(tmp_path, capsys):
    one_layer = {"positions.1.p": {2: -0.25}, "positions.1.a": {0: 0.005}}
    run = trained(tmp_path, one_layer, "pos_emb=kerple_log", "pos_emb_shared=false")
    assert main(run) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for words in (
        f"kerple_log, step 10 of {tmp_path}",
        "Layer 0: Learned numbers are within their bounds │ ok",
        "Layer 1: Learned numbers are within their bounds │ no │ p of head 2 is stored as -0.25",
        "Layer 1: Learned numbers are in the kernel's region │ no │ p of head 2 is stored as -0.25",
        "4 hold, 0 fail",
    ):
        assert words in printed


def test_a_learned_kernel_that_is_not_what_it_claims_is_the_exit_status(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(REGISTRY["bam"], "claims", ("conditionally_positive_definite",))
    run = trained(tmp_path, {"positions.0.exponent": {1: 2.5, 3: -1.0}}, "pos_emb=bam")
    assert main(run) == 1
    printed = capsys.readouterr().out
    assert "2.5" in printed
    assert "1 hold, 1 fail" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give the name of an encoding, or --checkpoint DIR"),
        (["alibi", "--step", "3"], "--step: it chooses a checkpoint of a run"),
        (["alibi", "--checkpoint", "nowhere"], "a checkpoint knows its encoding and its options"),
        (["--checkpoint", "nowhere"], "no folder nowhere - train first"),
        (["kerple_lag"], "pos_emb: no encoding is called 'kerple_lag'; did you mean kerple_log?"),
        (
            ["alibi", "--option", "slope=1"],
            "pos_emb_args: alibi takes no option 'slope'; did you mean slopes?",
        ),
        (
            ["alibi", "--option", "slope_factor"],
            "--option: slope_factor: is neither a file nor key=value; write --option",
        ),
        (["alibi", "--from", "nowhere.py"], "pos_emb_file: nowhere.py cannot be read"),
        (["mep"], "pos_emb_args: mep needs the option kernels"),
        (["alibi", "--heads", "0"], "--heads and --head_dim are at least 1"),
        (["alibi", "--train_length", "8"], "--train_length: 8 is less than 32; make it longer"),
    ],
)
def test_what_the_user_got_wrong_is_one_message(words, message, capsys):
    assert main(words) == 1
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""
