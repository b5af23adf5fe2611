"""The checker passes what is right, and says which promise each planted mistake breaks."""

import pytest
import torch
from torch import nn

from megatron.commands.check_encoding import main
from megatron.conformance import checks as properties
from megatron.conformance.checks import CHECKS, FACT, FAILS, HOLDS, NOT_APPLICABLE, Finding, examine
from megatron.conformance.subject import Subject
from megatron.positions import DistanceBias, Position, register
from megatron.positions.rotary import Rotary

pytestmark = pytest.mark.usefixtures("own_registry")


SLOW = (properties.finite_losses, properties.prefix_consistent, properties.bounds_hold)
QUICK = [check for check in CHECKS if check not in SLOW]


def verdicts(name: str) -> dict[str, Finding]:
    return {found.check: found for found in examine(Subject(name), QUICK)}


def failing(encoding: type[Position], *more) -> list[str]:
    register("planted")(encoding)
    return [
        found.check
        for found in examine(Subject("planted"), [*QUICK, *more])
        if found.verdict == FAILS
    ]


@pytest.mark.parametrize(
    "name", ["kerple_log", "rotary", "sinusoidal", "learned", "none", "fire", "cable"]
)
def test_encodings_with_every_kind_of_hook_keep_what_they_must(name):
    found = examine(Subject(name), CHECKS if name == "kerple_log" else QUICK)
    assert [f"{one.check}: {one.detail}" for one in found if one.verdict == FAILS] == []
    assert len({one.check for one in found}) == len(found)
    assert all(one.detail for one in found if one.verdict == NOT_APPLICABLE)


def test_what_does_not_apply_says_why_and_what_is_no_fault_is_a_fact():
    found = verdicts("learned")
    assert found["Scores depend on the distance alone"].verdict == FACT
    assert found["The bias is 0 at distance 0"].detail == "it has no bias by distance"
    assert (
        "learned positions end at 64"
        in found["Everything is finite at 16384 and at 131072 tokens"].detail
    )
    found = verdicts("t5")
    assert found["The bias never rises with distance"].verdict == FACT
    assert "rises by" in found["The bias never rises with distance"].detail
    assert verdicts("cable")["eager = sdpa, forward and backward"].verdict == NOT_APPLICABLE


class OneNumber(DistanceBias):
    """A slope per head."""

    def __init__(self, shape):
        super().__init__(shape)
        self.slope = nn.Parameter(torch.rand(shape.heads))

    def log_kernel(self, distance):
        return -self.bounded("slope")[:, None] * distance


def test_a_plain_encoding_of_a_user_passes():
    assert failing(OneNumber) == []


def test_a_kernel_that_depends_on_the_length_is_found():
    class Normalised(OneNumber):
        def log_kernel(self, distance):
            return super().log_kernel(distance / len(distance))

    found = failing(Normalised, properties.prefix_consistent)
    assert {
        "Lengths 512, 16384, 64 after each other agree",
        "The first tokens do not notice what follows",
    } <= set(found)


def test_a_logarithm_of_zero_is_found():
    class Logarithm(OneNumber):
        def log_kernel(self, distance):
            return super().log_kernel(distance.log())

    assert "Everything is finite at 16384 and at 131072 tokens" in failing(Logarithm)


def test_a_table_of_another_shape_is_found():
    class Shared(OneNumber):
        def log_kernel(self, distance):
            return super().log_kernel(distance)[:1]

    assert "Tables are [heads, length] float32 for 1 to 32 heads" in failing(Shared)


def test_a_broken_claim_fails_and_no_claim_is_a_fact():
    class Rising(OneNumber):
        claims = ("never_rises", "zero_at_0")

        def log_kernel(self, distance):
            return 1 - super().log_kernel(distance)

    assert failing(Rising) == ["The bias is 0 at distance 0", "The bias never rises with distance"]
    Rising.claims = ()
    assert verdicts("planted")["The bias never rises with distance"].verdict == FACT


def test_a_number_that_the_cast_rounds_is_found():
    class Rounded(OneNumber):
        def _apply(self, fn, recurse=True):
            return nn.Module._apply(self, fn, recurse)  # as if float32 were not kept

    assert "Casting the model to bfloat16 rounds nothing" in failing(Rounded)


def test_a_parameter_without_a_gradient_is_found():
    class Detached(OneNumber):
        def log_kernel(self, distance):
            return -self.slope.detach()[:, None] * distance

    assert "Gradients equal finite differences in float64" in failing(Detached)


def test_a_wrong_gradient_is_found():
    class Clamped(OneNumber):
        def log_kernel(self, distance):
            slope = self.slope + (self.slope**2 - self.slope).detach()
            return -slope[:, None] * distance

    assert "Gradients equal finite differences in float64" in failing(Clamped)


def test_a_number_that_runs_out_of_its_domain_is_found():
    class Root(OneNumber):
        def log_kernel(self, distance):
            return -(0.01 * (self.slope[:, None] - 0.9) * (distance - 3)).sqrt()

    assert "100 optimizer steps leave all finite and within bounds" in failing(
        Root, properties.bounds_hold
    )


def test_a_tensor_that_is_saved_for_nothing_is_found():
    class Cached(OneNumber):
        def __init__(self, shape):
            super().__init__(shape)
            self.register_buffer("table_of_512", torch.zeros(512))

    assert failing(Cached) == ["Saving and loading changes nothing"]


def test_a_rotation_that_forgets_where_a_piece_of_text_starts_is_found():
    class Forgetful(Rotary):
        def on_queries_keys(self, q, k, start=0):
            return super().on_queries_keys(q, k, 0)

    assert failing(Forgetful) == ["Decoding with a cache is the full forward pass"]


def test_the_report_names_options_verdicts_and_the_end(capsys):
    assert main(["alibi", "--option", "slope_factor=0.5", "--heads", "2"]) == 0
    printed = capsys.readouterr().out
    for words in (
        "alibi {slope_factor: 0.5}, 2 heads of 8",
        "Decoding with a cache",
        HOLDS,
        "0 fail: the encoding keeps",
    ):
        assert words in printed


def test_a_failure_is_shown_and_is_the_exit_status(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "from megatron.positions import DistanceBias, register\n\n\n"
        "@register('falling')\nclass Falling(DistanceBias):\n    '''-d / length'''\n\n"
        "    def log_kernel(self, distance):\n        return (-distance / len(distance)).expand(self.shape.heads, -1)\n"
    )
    assert main(["falling", "--from", str(tmp_path / "mine.py")]) == 1
    assert FAILS in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
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
    ],
)
def test_what_the_user_got_wrong_is_one_message(words, message, capsys):
    assert main(words) == 1
    told = capsys.readouterr()
    assert message in told.err
    assert told.out == ""
