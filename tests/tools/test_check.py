"""The command prints the table or JSON, and its exit status says whether something fails."""

import json

import pytest

from megatron.conformance.subject import HOLDS
from tools.check import main

BIAS = """
import torch

def bias(heads, queries, keys):
    slopes = 2 ** (-8 * torch.arange(1, heads + 1) / heads)
    distance = torch.arange(keys) - torch.arange(keys - queries, keys)[:, None]
    return slopes[:, None, None] * distance

def double(heads, queries, keys):
    return 2 * bias(heads, queries, keys)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "of_somebody.py").write_text(BIAS)
    (tmp_path / "broken.py").write_text("import torch\nslopes = 1 / 0\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_table_fits_a_terminal_and_a_failure_is_the_exit_status(folder, capsys):
    assert main(["of_somebody:bias", "--length", "1024"]) == 1
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 100
    assert "FAIL  Slopes of ALiBi are its authors'" in printed
    assert printed.endswith("\n1 fail\n")


def test_json_has_a_verdict_and_the_exit_status_is_0_if_all_holds(folder, capsys):
    options = ["--as", "alibi", "--option", "slope_factor=2", "--length", "256"]
    assert main(["of_somebody:double", *options, "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    *_, agreement = json.loads(line)["findings"]
    assert agreement["verdict"] == HOLDS
    assert agreement["check"] == "Agreement with an encoding of ours"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["of_somebody:nothing"], "of_somebody:nothing: is no folder, and no module:name"),
        (["broken:slopes"], "ZeroDivisionError"),
        (["models/llama"], "is no folder"),
        (["."], "transformers cannot load it"),
        (["of_somebody:bias", "--option", "base=1"], "needs --as NAME"),
    ],
)
def test_what_cannot_be_checked_is_one_message(folder, capsys, words, message):
    assert main(words) == 1
    printed = capsys.readouterr()
    assert message in printed.err
    assert "Traceback" not in printed.err
    assert not printed.out
