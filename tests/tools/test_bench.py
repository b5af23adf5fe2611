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


def test_times_stand_beside_the_first_and_a_reason_where_an_encoding_cannot_run(capsys):
    step, evaluation = "step of 2 x 16 tokens", "evaluation of 300 tokens"
    token = "a token after 300"
    printed = tables(capsys, "rotary learned cable --length 300 --batch 2", status=1)
    assert printed.keys() == {step, evaluation, token}
    for rows in printed.values():
        assert rows.keys() == {"rotary", "learned", "cable"}
        assert rows["rotary"] == "1"
        assert float(rows["cable"]) > 0
    assert float(printed[step]["learned"]) > 0
    assert printed[evaluation]["learned"] == "-"  # 16 rows of positions
    assert printed[token]["learned"] == "-"


def test_no_token_is_timed_beside_nanogpt_which_has_no_cache(capsys):
    printed = tables(capsys, "nanogpt rotary --length 20")
    assert printed.keys() == {"step of 1 x 16 tokens", "evaluation of 20 tokens"}


@pytest.mark.parametrize("name", ["rotary", "t5", "abacus", "cope", "fox", "path", "wall"])
def test_a_token_after_a_text_sees_all_of_it(name):
    sizes = {"hidden": 32, "layers": 2, "heads": 4, "vocab": 40, "train_length": 16, "length": 24}
    options = bench.argparse.Namespace(**sizes)
    settings = bench.options_in_file(name, 32)
    torch.manual_seed(0)
    call = bench.evaluation(True, options, name, settings)
    logits = torch.cat([call(), call()], dim=1)

    torch.manual_seed(0)  # the same weights and text
    gpt = bench.model(options, name, settings)
    text = torch.randint(options.vocab, (1, options.length))
    whole_text = torch.cat([text, text[:, :1], text[:, :1]], dim=1)
    torch.testing.assert_close(logits, gpt(whole_text)[:, -2:], atol=1e-5, rtol=1e-5)


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
            outputs.append(bench.attention(128, False, options, name, {})())
    torch.testing.assert_close(*outputs)


def test_every_encoding_can_be_built_for_the_longest_text():
    for name in REGISTRY:
        build(name, Shape(3, 8, 24, 16), **bench.options_in_file(name, 32))
    assert bench.options_in_file("learned", 32)["max_positions"] == 32


def test_a_dense_encoding_takes_its_matrices(capsys):
    assert bench.main(["cope", "--attention", "512", *MODEL.split()]) == 0
    line = re.findall(r"^\| cope \|.*\| ([\d,]+) \|$", capsys.readouterr().out, re.M)[0]
    assert int(line.replace(",", "")) > 4 * 512**2 * 4 / 2**20  # the scores of four heads
