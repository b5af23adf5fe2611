"""Recipes in the spelling of GPT-NeoX of 2022, as KERPLE's and MEP's are, keep their behaviour.

`fp16: {type: bfloat16}` marks them: no later GPT-NeoX reads it so, and none of our files has it.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from megatron.config.faults import Report

HALF = ("bf16", "bfloat16")
DEVIATIONS = {
    "rounding": (
        "positions, distances and biases are float32 here; the forks rounded them to bfloat16"
    ),
    "softmax": (
        "the softmax is float32 here; the forks' was bfloat16 without attention_softmax_in_fp32"
    ),
}
"""What stays different, beside the keys without effect. docs/published_files.md has all of it."""


def is_recipe_of_2022(given: Mapping[str, Any]) -> bool:
    """Whether one source asks for bfloat16 as GPT-NeoX did in 2022, and only then."""
    fp16 = given.get("fp16")
    return isinstance(fp16, dict) and fp16.get("type") in HALF


def complete_recipe(
    sources: Iterable[Mapping[str, Any]], merged: dict[str, Any], report: Report
) -> None:
    """Give a recipe of 2022 its learning rate schedule, and say what remains different."""
    given = list(sources)
    if not any(is_recipe_of_2022(source) for source in given):
        return
    if "lr_schedule" not in merged:
        merged["lr_schedule"] = "neox-2022"
        report.note(
            "lr_schedule: neox-2022, as the files are of 2022 (fp16.type: bfloat16);"
            " set lr_schedule: standard for today's"
        )
    if not merged.get("paper_precision"):
        report.note(f"of 2022: {DEVIATIONS['rounding']}; paper_precision: true does so too")
    if not any(source.get("attention_softmax_in_fp32") for source in given):
        report.note(f"of 2022: {DEVIATIONS['softmax']}")
