"""A checkpoint saved by one engine is continued by another; damage to that of two ranks."""

import itertools

import pytest

from megatron.parallel.grid import connect
from tests.faults import damage
from tests.training.conftest import records, tiny

EXACT, ROUNDED = 1e-5, 1e-3
"""Allowed differences of losses. DeepSpeed sums gradients in bfloat16 at stages 2 and 3."""
KINDS = [
    (precision, ranks, stage)
    for precision, ranks, stage in itertools.product(("fp32", "bf16"), (1, 2), range(4))
    if (precision, stage) != ("bf16", 0)  # runs as stage 1
]

pytestmark = [pytest.mark.campaign, pytest.mark.distributed]


def test_every_engine_is_continued_by_the_next_of_its_precision(forks, corpus, tmp_path):
    """Every run takes eight windows a step, and no dropout."""

    def train(kind, save, *more):
        precision, ranks, stage = kind
        settings = [
            "pos_emb=mep_param",
            "train_iters=8",
            "save_interval=4",
            f"gradient_accumulation_steps={2 // ranks}",
            f"zero_optimization.stage={stage}",
            f"precision={precision}",
            f"data_path={corpus}",
            f"save={save}",
        ]
        log = save.with_suffix(".log")
        forks.run_ranks(ranks, "train.py", *tiny(*settings, *more), log=log)
        return records(save)

    before = {kind: train(kind, tmp_path / f"run{place}") for place, kind in enumerate(KINDS)}
    for place, writer in enumerate(KINDS):
        same = [kind for kind in KINDS if kind[0] == writer[0]]
        reader = same[(same.index(writer) + 1) % len(same)]
        load = f"load={tmp_path}/run{place}/global_step4"
        after = train(reader, tmp_path / f"to{place}", load)
        assert after.keys() == {5, 6, 7, 8}
        rounds = writer[0] == "bf16" and max(writer[2], reader[2]) >= 2
        for step, record in after.items():
            gap = abs(before[writer][step]["loss"] - record["loss"])
            assert gap <= (ROUNDED if rounds else EXACT), (writer, reader, step)


def test_damage_to_a_checkpoint_of_two_ranks_is_named(forks, corpus, tmp_path):
    """One rank resumes it, with as many windows in a step."""
    with damage.own_encoding(tmp_path):
        words = damage.words(corpus, tmp_path, "zero2")
        forks.run_ranks(2, "train.py", *words, log=tmp_path / "log")
        batch = "train_micro_batch_size_per_gpu=8"
        outcomes = damage.found_by_use(corpus, tmp_path, "zero2", connect(), batch)
    assert len(outcomes) > 20
    assert all(outcome.named for outcome in outcomes), [
        outcome for outcome in outcomes if not outcome.named
    ]
