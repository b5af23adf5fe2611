"""tools/bench.py on tiny sizes: what it runs and prints, never how fast it was."""

import re

import pytest
import torch

from megatron.positions import REGISTRY, Shape, build
from tools import bench

MODEL = "--hidden 32 --layers 2 --heads 4 --vocab 40 --train_length 16 --threads 1 --rounds 1"


def tables(capsys, words, status=0):
    """The names and ratios of each printed table, by its title."""
    assert bench.main([*words.split(), *MODEL.split()]) == status
    sections = capsys.readouterr().out.split("#### ")[1:]
    found = {}
    for section in sections:
        rows = re.findall(r"^\| (.+?) \| .* \| (.*) \| .* \|$", section, re.M)
        found[section.splitlines()[0]] = dict(rows[1:])
    return found


def test_steps_and_evaluations_stand_beside_the_first_and_a_reason_where_one_cannot_run(capsys):
    step, evaluation = "step of 2 x 16 tokens", "evaluation of 300 tokens"
    printed = tables(capsys, "rotary learned cable --length 300 --batch 2", status=1)
    assert printed.keys() == {step, evaluation}
    for rows in printed.values():
        assert rows.keys() == {"rotary", "learned", "cable"}
        assert rows["rotary"] == "1"
    assert float(printed[step]["learned"]) > 0
    assert printed[evaluation]["learned"] == "-"  # 16 rows of positions


def test_attention_with_each_kind_of_term_stands_beside_plain_attention(capsys):
    names = "alibi kerple_log kerple_bias_wht fox cable rotary path cope"
    printed = tables(capsys, f"{names} --attention 24")
    assert printed.keys() == {"attention, 24", "attention and backward, 24"}
    for rows in printed.values():
        assert rows.keys() == {"plain attention", *names.split()}
        assert all(float(ratio) > 0 for ratio in rows.values())


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_computes_what_ours_does():
    options = bench.argparse.Namespace(hidden=32, heads=2, train_length=128, vocab=40)
    with torch.compiler.set_stance("force_eager"):
        outputs = []
        for name in ("kerple_log", "kerple_log" + bench.FLEX):
            torch.manual_seed(0)
            outputs.append(bench.attention(options, 128, False, name, {})())
    torch.testing.assert_close(*outputs)


def test_every_encoding_can_be_built_for_the_longest_text():
    for name in REGISTRY:
        build(name, Shape(3, 8, 24, 16), **bench.options_in_file(name, 32))
    assert bench.options_in_file("learned", 32)["max_positions"] == 32


def test_a_dense_encoding_takes_its_matrices(capsys):
    assert bench.main(["cope", "--attention", "512", *MODEL.split()]) == 0
    line = re.findall(r"^\| cope \|.*\| ([\d,]+) \|$", capsys.readouterr().out, re.M)[0]
    assert int(line.replace(",", "")) > 4 * 512**2 * 4 / 2**20  # the scores of four heads
