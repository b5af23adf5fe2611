"""tools/migrate_config.py: today's spelling of published files, as a proposal."""

import pytest
import yaml

from megatron.config import load
from megatron.config.config import Config
from tests.published import MEP, Experiment, experiments, files_of, one_of_each, write_bases
from tools.migrate_config import main

HIDING = "snope_norm_original_scaling__"
ONE = Experiment("ali_tanh_gau_all003_fp32", "openwebtext2", 1235, HIDING, "160")
UNREADABLE = Experiment("snope_sigmoid_hall_fp32", "openwebtext2", 1235, HIDING, "160")


@pytest.fixture
def published(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_bases(tmp_path)
    return tmp_path


def some(table: str) -> list[Experiment]:
    """One experiment of each pos-emb."""
    return [*{one.pos_emb: one for one in experiments(table)}.values()]


def of(config: Config) -> dict:
    return {key: value for key, value in config.flat().items() if not key.startswith("pos_emb")}


def test_a_migrated_run_is_the_same_run_with_explicit_kernels(published, capsys):
    files = files_of(ONE, published, "train")
    assert main([*map(str, files), "-o", "today"]) == 0
    printed = capsys.readouterr().out
    assert "+pos_emb_args: {kernels: [exp, tanh, gaussian]}" in printed
    assert '-    "pos-emb": "snope_norm_original_scaling__",' in printed
    before = load(files)
    after = load([published / "today" / file.name for file in files])
    assert of(after) == of(before)
    assert after.position.pos_emb == "mep"
    assert after.position.pos_emb_args == {"kernels": ["exp", "tanh", "gaussian"]}
    assert not any("accepted" in note for note in after.notes)
    text = (published / "today" / f"{ONE.stem}.yml").read_text()
    assert f"# pos_emb: kernels were derived from the file's name {ONE.stem}; check them" in text
    assert "the released code computes kernels: [exp, {exp: 0.5}, gaussian] for every" in text
    assert "which differs" in text


def test_a_name_that_cannot_be_read_keeps_the_released_code_and_says_so(published, capsys):
    path = files_of(UNREADABLE, published, "train")[-1]
    assert main([str(path)]) == 0
    printed = capsys.readouterr().out
    assert "+pos_emb: mep_free\n" in printed
    assert "does not say which kernels were meant: the released code has no sigmoid" in printed
    assert [*published.glob("*/*.yml")] == []  # nothing is written without -o


@pytest.mark.parametrize(
    "experiments_of", [some, pytest.param(one_of_each, marks=pytest.mark.campaign)]
)
def test_every_kind_of_file_migrates_to_what_loads(published, experiments_of):
    for one in experiments_of(MEP):
        path = files_of(one, published, "train")[-1]
        assert main([str(path), "-o", f"out/{one.scaling}"]) == 0
        given = yaml.safe_load((published / "out" / one.scaling / path.name).read_text())
        base = [published / "local_setup", published / "train"]
        after = load([*base, published / "out" / one.scaling / path.name])
        before = load([*base, path])
        assert of(after) == of(before)
        if given["pos_emb"] != "mep":
            assert after.position == before.position


def test_nothing_is_replaced(published, capsys):
    file = str(published / "train.yml")
    assert main([file, "-o", "."]) == 1
    assert "train.yml exists or is written twice" in capsys.readouterr().err
    (published / "other").mkdir()
    (published / "other" / "train.yml").write_text("{}")
    assert main([file, "other/train.yml", "-o", "new"]) == 1
    assert "train.yml exists or is written twice" in capsys.readouterr().err
    assert not (published / "new").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "holds no `key: value` lines, but [1]"),
        ("pos-emb: kerple_power_b_", "no encoding is called 'kerple_power_b_'"),
        ("zero_optimization: {cpu_offload: true}", "CPU's memory is not offered"),
    ],
)
def test_bad_files_have_one_message(published, capsys, text, message):
    (published / "bad.yml").write_text(text)
    assert main(["bad.yml", "-o", "out"]) == 1
    assert message in capsys.readouterr().err
    assert main(["absent.yml"]) == 1
    assert "absent.yml: no such file" in capsys.readouterr().err
    assert not (published / "out").exists()
