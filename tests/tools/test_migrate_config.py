"""tools/migrate_config.py: today's spelling of published files, as a proposal."""

import pytest

from megatron.config import load
from tests.published import MEP, Experiment, experiments, files_of, write_bases
from tools.migrate_config import main

HIDING = "snope_norm_original_scaling__"
ONE = Experiment("ali_tanh_gau_all003_fp32", "openwebtext2", 1235, HIDING, "160")


@pytest.fixture
def published(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_bases(tmp_path)
    return tmp_path


def of(config):
    return {key: value for key, value in config.flat().items() if not key.startswith("pos_emb")}


def test_a_migrated_run_is_the_same_run_with_explicit_kernels(published):
    files = files_of(ONE, published, "train")
    assert main([*map(str, files), "-o", "today"]) == 0
    before = load(files)
    after = load([published / "today" / file.name for file in files])
    assert of(after) == of(before)
    assert after.position.pos_emb == "mep"
    assert after.position.pos_emb_args == {"kernels": ["exp", "tanh", "gaussian"]}
    assert not any("accepted" in note for note in after.notes)
    text = (published / "today" / f"{ONE.stem}.yml").read_text()
    assert "# pos_emb: these kernels were derived from the file's name; check them\n" in text
    assert "# pos_emb: the released code computes kernels: [exp, {exp: 0.5}, gaussian]\n" in text
    assert main([str(files[0]), "-o", "today"]) == 1  # nothing is replaced


def test_every_encoding_migrates_to_what_loads_and_no_kernels_are_guessed(published, capsys):
    kinds = {experiment.pos_emb: experiment for experiment in experiments(MEP)}
    kinds[HIDING] = Experiment("snope_sigmoid_hall_fp32", "openwebtext2", 1235, HIDING, "160")
    for experiment in kinds.values():
        path = files_of(experiment, published, "train")[-1]
        assert main([str(path), "-o", "out"]) == 0
        base = [published / "local_setup", published / "train"]
        after, before = load([*base, published / "out" / path.name]), load([*base, path])
        assert of(after) == of(before)
        if after.position.pos_emb != "mep":
            assert after.position == before.position
    assert "not say which were meant: the released code has no sigmoid" in capsys.readouterr().out
