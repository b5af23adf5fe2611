"""Every registered encoding keeps what megatron/conformance checks, with any number of heads."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from megatron.config import load
from megatron.conformance import gradients, kernels, model, precision, tables
from megatron.conformance.checks import CHECKS, examine
from megatron.conformance.finding import FAILS, HOLDS, NOT_APPLICABLE, Check, Finding
from megatron.conformance.subject import Subject
from megatron.model import GPT, from_config
from megatron.positions import REGISTRY
from tests.support import NEEDED

OPTIONS = {**NEEDED, "learned": {"max_positions": 4096}}
ENCODINGS = {name: Subject(name, OPTIONS.get(name, {})) for name in sorted(REGISTRY)}

HALF_LEARNED = {"kernels": [{"exp": {"learned_slopes": True}}, "bam"], "weights": "learned"}
SHARED_WEIGHTS = {"kernels": ["t5", "kerple_log", "sandwich"], "weights": "learned_shared"}
# Options that make a number learned, of encodings that learn nothing without them.
LEARNED = {
    "learned alibi": Subject("alibi", {"learned_slopes": True}),
    "learned gaussian": Subject("gaussian", {"learned_slopes": True}),
    "learned tanh": Subject("tanh", {"learned_slopes": True}),
    "cope with keys of its gates": Subject("cope", {"separate_keys": True}),
    "fire of dape": Subject(
        "fire", {"mlp_layers": [4], "activation": "leaky_relu", "last_bias": True}
    ),
    "grape_m by content": Subject("grape_m", {"by_content": True, "by_head": True}),
    "learned weights": Subject(
        "mep", {"kernels": ["exp", "gaussian", "tanh"], "weights": "learned"}
    ),
    "shared weights": Subject("mep", SHARED_WEIGHTS),
    "learned slopes and weights": Subject("mep", HALF_LEARNED),
}
OTHERS = {
    "xpos with one decay": Subject("xpos", {"xi": 0.998}),
    "stick_breaking from the own key": Subject("stick_breaking", {"attend_current": True}),
}
SUBJECTS = ENCODINGS | LEARNED | OTHERS

every_encoding = pytest.mark.parametrize("name", sorted(ENCODINGS))
every_key = pytest.mark.parametrize("key", SUBJECTS)

# An encoding may refuse these, and only in these words.
REFUSALS = {
    tables.finite_far_away: "learned positions end at 4096, so length 16384 cannot be computed",
    model.finite_losses: "learned positions end at 4096, so length 16384 cannot be computed",
    tables.alone_in_a_mixture: "is more than a bias by distance, so it cannot be mixed",
}


CASES = [
    pytest.param(check, key, id=f"{check.__name__}-{key}")
    for check in CHECKS
    for key in SUBJECTS
    if key in ENCODINGS or check is not model.finite_losses  # slow: once per encoding
]


@cache
def finding_of(check: Check, key: str) -> Finding:
    subject = SUBJECTS[key]
    if check is model.finite_losses:
        subject = with_few_heads(subject)
    (finding,) = examine(subject, [check])
    return finding


def with_few_heads(subject: Subject) -> Subject:
    """The heads that a model at 16384 tokens needs: two where they have slopes of their own."""
    position = subject.position()
    costly = position.has("index_bias") or position.has("distance_weight")
    return replace(subject, heads=1 if costly else 2)


@pytest.mark.parametrize(("check", "key"), CASES)
def test_every_encoding_keeps_what_it_must(check, key):
    finding = finding_of(check, key)
    assert finding.verdict != FAILS, f"{finding.check}: {finding.detail}"
    if finding.detail.startswith("refused"):
        assert REFUSALS[check] in finding.detail


@every_key
@pytest.mark.parametrize("heads", [1, 3, 32])
def test_tables_are_finite_and_the_same_at_every_length_for_any_number_of_heads(key, heads):
    subject = replace(SUBJECTS[key], heads=heads)
    for finding in examine(subject, [tables.finite_far_away, tables.same_at_every_length]):
        assert finding.verdict != FAILS, f"{finding.check}: {finding.detail}"


BY_DISTANCE = {
    tables.zero_at_zero,
    tables.never_rises,
    kernels.conditionally_positive_definite,
    tables.alone_in_a_mixture,
}
A_TABLE = {tables.same_at_every_length}
A_BIAS = {tables.right_shape, precision.float32_under_autocast}
LEARNS = {
    gradients.gradients_match_finite_differences,
    gradients.gradients_finite_far_away,
    gradients.bounds_hold_anywhere,
    gradients.training_stays_finite,
}


@pytest.mark.parametrize(
    ("name", "not_applicable"),
    [
        ("none", BY_DISTANCE | A_TABLE | A_BIAS | LEARNS),
        ("alibi", LEARNS),
        ("kerple_log", set()),
        ("kerple_wht_2para", BY_DISTANCE),
        ("fire", BY_DISTANCE | A_TABLE),
        ("cable", BY_DISTANCE | A_TABLE | A_BIAS),
        ("cope", BY_DISTANCE | A_TABLE | A_BIAS | {model.backends_agree}),
        (
            "learned",
            BY_DISTANCE | A_TABLE | A_BIAS | {tables.finite_far_away, model.finite_losses},
        ),
    ],
)
def test_a_check_applies_wherever_its_hook_exists(name, not_applicable):
    """So that no promise is lost because a check calls itself not applicable."""
    slow = {model.finite_losses, gradients.training_stays_finite} - not_applicable
    for check in CHECKS:
        if check not in slow:
            finding = finding_of(check, name)
            expected = check in not_applicable
            assert (finding.verdict == NOT_APPLICABLE) == expected, finding


@pytest.mark.parametrize(
    "name",
    ["alibi", "gaussian", "kerple_log", "kerple_power", "kerple_bias_wht", "mep_free", "mep_param"],
)
def test_a_decaying_bias_starts_at_zero_and_never_rises(name):
    subject = Subject(name, heads=12, head_dim=64, train_length=512)
    for finding in examine(subject, [tables.zero_at_zero, tables.never_rises]):
        assert finding.verdict == HOLDS, f"{finding.check}: {finding.detail}"


def gpt(name: str) -> GPT:
    options = str(NEEDED.get(name, {})).replace("'", "")
    shape = ["num_layers=2", "hidden_size=32", "num_attention_heads=4", "seq_length=64"]
    config = load([], [*shape, f"pos_emb={name}", f"pos_emb_args={options}"])
    return from_config(config, vocab=50)


@pytest.fixture(scope="module")
def weights_without_encoding() -> dict[str, torch.Tensor]:
    return gpt("none").state_dict()


@every_encoding
def test_every_encoding_starts_from_the_same_weights(name, weights_without_encoding):
    weights = gpt(name).state_dict()
    for path, expected in weights_without_encoding.items():
        torch.testing.assert_close(weights[path], expected, rtol=0, atol=0)


@every_encoding
def test_the_docstring_names_the_encoding(name):
    assert REGISTRY[name].__doc__
