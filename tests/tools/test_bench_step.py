"""The benchmark of whole steps on a tiny model: what it writes, never how fast it was."""

import json
from dataclasses import fields
from statistics import median

import pytest
import torch
from step import Candidate, main, random_text, trunk
from torch.utils.flop_counter import FlopCounterMode

from tests.support import ROOT, run

SHAPE = {"hidden": 24, "layers": 2, "heads": 3, "vocab": 40, "train_length": 16}


def candidate(**more):
    values = {
        "pos_emb": "kerple_log",
        "backend": "eager",
        "training": True,
        "length": 16,
        "batch": 3,
    }
    values |= {"dtype": "float32", "device": "cpu", "compiled": False, **SHAPE}
    values |= {"document": 0, "apart": False, **more}
    return Candidate(**{field.name: values[field.name] for field in fields(Candidate)})


def test_steps_and_evaluations_are_measured_against_rotary(tmp_path, capsys):
    words = [
        "--encodings",
        "rotary",
        "kerple_log",
        "learned",
        "cable",
        "--backend",
        "auto",
        "--lengths",
        "32",
    ]
    words += ["--device", "cpu", "--threads", "1", "--rounds", "3", "--batch", "2", "--no-memory"]
    for name, size in SHAPE.items():
        words += [f"--{name}", str(size)]
    assert main([*words, "--output", str(tmp_path / "found.json")]) == 0
    printed = capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text())
    rows = {(row["candidate"], row["training"]): row for row in found["rows"]}
    assert {name for name, _ in rows} == {
        f"{name}, auto" for name in ("rotary", "kerple_log", "learned", "cable")
    } | {"kerple_log, eager"}
    refused = rows.pop(("learned, auto", False))
    assert (refused["ms"], refused["ratio"], refused["tokens_per_second"]) == ([], None, None)
    assert refused["reason"].startswith("not run: ")
    assert f"| {refused['reason']} |" in printed
    for (_, training), row in rows.items():
        rotary = rows["rotary, auto", training]
        assert (row["reason"], row["batch"], row["length"]) == (
            None,
            *((2, 16) if training else (1, 32)),
        )
        assert row["ratio"] == median(
            mine / theirs for mine, theirs in zip(row["ms"], rotary["ms"], strict=True)
        )
        assert row["tokens_per_second"] == pytest.approx(32 / median(row["ms"]) * 1000)
        seconds_at_best = row["palm_flops"] / found["peaks"]["float32"]["flops_per_second"]
        assert row["mfu"] == pytest.approx(seconds_at_best / median(row["ms"]) * 1000)
    assert (tmp_path / "found.md").read_text() == printed


@pytest.mark.parametrize("training", [False, True])
def test_palms_operations_are_those_that_torch_counts_on_the_dense_way(training):
    one = candidate(training=training)
    call = one.prepare()
    with FlopCounterMode(display=False) as counter:
        call()
    counted = counter.get_total_flops()
    assert one.palm_flops == counted
    assert one.flops == counted - (3 if training else 1) * 3 * 4 * 2 * 24 * (16 * 15 // 2)


def test_a_step_trains_the_weights_and_the_encoding_whose_turn_it_is_alone():
    model, _ = trunk(*SHAPE.values(), "float32", "cpu", False)
    calls = [candidate(pos_emb=name).prepare() for name in ("kerple_log", "t5")]
    encodings = []
    for call in calls:
        call()
        encodings.append(model.positions)

    def state():
        return [
            [p.detach().clone() for p in part.parameters()] for part in (model.layers, *encodings)
        ]

    before = state()
    calls[0]()
    changed = [
        any(not torch.equal(*pair) for pair in zip(*parts, strict=True))
        for parts in zip(before, state(), strict=True)
    ]
    assert changed == [True, True, False]
    assert model.positions is encodings[0]


def test_the_tools_need_neither_deepspeed_nor_pydantic():
    blocked = (
        "import sys; sys.modules.update(dict.fromkeys(['deepspeed', 'pydantic', 'yaml', 'rich'])); "
    )
    code = f"{blocked} sys.path.insert(0, {str(ROOT / 'tools/bench')!r}); import attention, step"
    done = run("-c", code)
    assert done.returncode == 0, done.stderr


def test_documents_apart_are_measured_beside_the_same_text_in_one(tmp_path, capsys):
    words = ["--encodings", "rotary", "alibi", "--eager", "--lengths", "300", "--documents", "20"]
    words += ["--device", "cpu", "--threads", "1", "--rounds", "2", "--batch", "2", "--no-memory"]
    for name, size in SHAPE.items():
        words += [f"--{name}", str(size)]
    assert main([*words, "--output", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    names = {row["candidate"] for row in found["rows"]}
    assert names == {
        "rotary, auto",
        "alibi, auto",
        "rotary, auto, documents of 20 apart",
        "alibi, auto, documents of 20 apart",
    }
    assert all(row["reason"] is None for row in found["rows"])
    assert "| alibi, auto, documents of 20 apart |" in capsys.readouterr().out


def test_a_text_of_documents_has_an_end_in_as_many_tokens():
    ids = random_text(50, 1000, 40, 100)
    assert (ids == 0).float().mean() == pytest.approx(0.01, rel=0.2)
    assert (random_text(50, 1000, 40, 0) > 0).all()
