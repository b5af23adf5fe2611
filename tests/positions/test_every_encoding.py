"""Every registered encoding keeps what megatron/conformance checks, with any number of heads.

The checks of a whole model run over what looks at content, and over one encoding of each signature
of hooks.
"""

import pytest
import torch

from megatron.config import load
from megatron.conformance import checks
from megatron.conformance.checks import CHECKS, examine
from megatron.conformance.subject import FAILS, NOT_APPLICABLE, Subject
from megatron.model import GPT, from_config
from megatron.positions import REGISTRY
from tests.encodings import SAMPLE
from tests.support import NEEDED, of_encoding

OPTIONS = {**NEEDED, "learned": {"max_positions": 4096}}
ENCODINGS = {name: Subject(name, OPTIONS.get(name, {})) for name in sorted(REGISTRY)}

SHARED_WEIGHTS = {"kernels": ["t5", "kerple_log", "sandwich"], "weights": "learned_shared"}
FIRE_OF_DAPE = {"mlp_layers": [4], "activation": "leaky_relu", "last_bias": True}
# Options that make a number learned, or another hook.
WITH_OPTIONS = {
    "learned alibi": Subject("alibi", {"learned_slopes": True}),
    "cope with keys of its gates": Subject("cope", {"separate_keys": True}),
    "carope from one": Subject("carope", {"from_one": True}),
    "learned fope": Subject("fope", {"learned": True, "keep_slow": True}),
    "shared fope": Subject("fope", {"shared": True, "dim": 32}),
    "fire of dape": Subject("fire", FIRE_OF_DAPE),
    "grape_m by content": Subject("grape_m", {"by_content": True, "by_head": True}),
    "shared weights": Subject("mep", SHARED_WEIGHTS),
    "xpos with one decay": Subject("xpos", {"xi": 0.998}),
    "wall with scalar gates": Subject("wall", {"scalar_gate": True}),
    "repo of one position for all heads": Subject("repo", {"by_head": False, "gated": False}),
    "stick_breaking from the own key": Subject("stick_breaking", {"attend_current": True}),
}
SUBJECTS = ENCODINGS | WITH_OPTIONS

OF_A_MODEL = {
    checks.later_tokens_change_nothing,
    checks.cached_is_full,
    checks.backends_agree,
    checks.gradients_reach_every_parameter,
}
# An encoding may refuse these, and only in these words.
REFUSALS = {
    checks.finite_far_away: ["learned positions end at 4096, so length 16384 cannot be computed"],
    checks.parts_sum_to_the_whole: [
        "score_bias does not say that its w is a sum",
        "block_scores reads the tokens between query and key",
    ],
}
BY_DISTANCE = {checks.zero_at_zero, checks.never_rises, checks.conditionally_positive_definite}
A_BIAS = {checks.right_shape}
FAR = {checks.finite_far_away}
BY_CONTENT = {checks.parts_sum_to_the_whole}
LEARNS = {
    checks.gradients_match_finite_differences,
    checks.bounds_hold_anywhere,
}
# A check applies wherever its hook exists, so that none is lost because it calls itself "n/a".
DO_NOT_APPLY = {
    "none": BY_DISTANCE | A_BIAS | LEARNS | BY_CONTENT,
    "alibi": LEARNS | BY_CONTENT,
    "kerple_log": BY_CONTENT,
    "kerple_wht_2para": BY_DISTANCE | BY_CONTENT,
    "fire": BY_DISTANCE | BY_CONTENT,
    "cable": BY_DISTANCE | A_BIAS | FAR,
    "cope": BY_DISTANCE | A_BIAS | FAR | BY_CONTENT | {checks.backends_agree},
    "learned": BY_DISTANCE | A_BIAS | BY_CONTENT | {checks.finite_far_away},
}


@pytest.mark.parametrize("key", SUBJECTS)
def test_every_encoding_keeps_what_it_must(key):
    in_a_model = key in SAMPLE or SUBJECTS[key].position().looks_at_content
    chosen = [check for check in CHECKS if in_a_model or check not in OF_A_MODEL]
    findings = dict(zip(chosen, examine(SUBJECTS[key], chosen), strict=True))
    assert not [finding for finding in findings.values() if finding.verdict == FAILS]
    for check, finding in findings.items():
        if finding.detail.startswith("refused"):
            assert any(reason in finding.detail for reason in REFUSALS[check])
    if key in DO_NOT_APPLY:
        silent = {check for check in chosen if findings[check].verdict == NOT_APPLICABLE}
        assert silent == DO_NOT_APPLY[key] & {*chosen}


def gpt(name: str) -> GPT:
    shape = ["num_layers=2", "hidden_size=32", "num_attention_heads=4", "seq_length=64"]
    config = load([], [*shape, *of_encoding(name)])
    return from_config(config, vocab=50)


def test_every_encoding_starts_from_the_same_weights():
    weights_without_encoding = gpt("none").state_dict()
    for name, encoding in REGISTRY.items():
        if encoding.heads_per_query > 1:
            continue  # its model has smaller matrices
        weights = gpt(name).state_dict()
        for path, expected in weights_without_encoding.items():
            assert torch.equal(weights[path], expected), f"{name}: {path}"
