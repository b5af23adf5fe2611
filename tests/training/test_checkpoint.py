"""What a checkpoint holds, which ones stay, and what a missing or damaged one says."""

import errno
import json
import math

import pytest
import torch

from megatron.checkpoints import write
from megatron.checkpoints.manifest import RECORD, read_record
from megatron.checkpoints.read import load_for_evaluation
from megatron.checkpoints.saved import find, keep_weights_only, latest_step, steps_in
from megatron.config import load
from megatron.config.schema import Checkpoint
from megatron.errors import UserError
from megatron.training import checkpoint
from megatron.training.checkpoint import Keeper, is_saved
from megatron.training.loop import train, train_step
from tests.faults.damage import KINDS, changed, found_by_use, own_encoding
from tests.faults.damage import settings as damage_settings
from tests.training.conftest import copy_of, settings, tiny
from tests.training.test_engine import text, trainer


def test_a_checkpoint_gives_back_the_trained_model_and_its_own_configuration(
    grid, corpus, tmp_path
):
    config = settings(corpus, tmp_path, "precision=bf16", "train_iters=4")
    train(config, grid)
    model, saved, meta = load_for_evaluation(tmp_path)
    facts = [meta[key] for key in ("step", "config_hash", "vocab", "corpus", "threads")]
    assert facts == [4, config.hash, 512, "tiny", torch.get_num_threads()]
    assert saved.flat() == config.flat()
    # Float32 masters, not bfloat16 copies: most of them are no bfloat16 numbers.
    weight = model.layers[0].mlp.dense_h_to_4h.weight
    assert (weight != weight.bfloat16().float()).float().mean() > 0.9
    files = [path for path in (tmp_path / "global_step4").iterdir() if path.is_file()]
    assert len({path.stat().st_mode for path in files}) == 1, "the umask decides"


def test_an_absent_checkpoint_says_what_was_looked_for(trained, tmp_path):
    cases = [
        (tmp_path / "no", None, rf"no folder {tmp_path}/no - train first, or set load"),
        (tmp_path, None, r"looked for global_stepN/checkpoint.json in .*, steps there: none"),
        (trained, 9, r"looked for global_step9/checkpoint.json in .*: 4 - check load"),
    ]
    for folder, step, message in cases:
        with pytest.raises(UserError, match=message):
            load_for_evaluation(folder, step=step)
    (tmp_path / "config.json").touch()
    with pytest.raises(UserError, match=rf"import_checkpoint.py {tmp_path} -o RUN brings in"):
        find(tmp_path)


# --- damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if kind in ("fp32", "zero2") else pytest.mark.campaign)
        for kind in KINDS
    ],
)
def test_no_damage_to_any_file_is_used(kind, grid, corpus, tmp_path):
    run = tmp_path / "run"
    with own_encoding(tmp_path):
        train(damage_settings(corpus, tmp_path, kind), grid)
        found = found_by_use(corpus, tmp_path, kind, grid)
    assert not [one for one in found if one.message is None]
    assert all(one.named for one in found), [one for one in found if not one.named]
    better = f"the newest good checkpoint of the run is {run}/global_step1: "
    assert all(better in one.message for one in found)
    assert latest_step(run) == 2


def test_a_flipped_bit_or_another_entry_of_the_record_is_noticed(trained, tmp_path):
    file = copy_of(trained, tmp_path) / "global_step4" / RECORD
    content = file.read_bytes()
    for place in range(0, len(content), 7):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        with changed(file, bytes(damaged)), pytest.raises(UserError, match=RECORD):
            read_record(file.parent)
    record = {"step": 4, "config_hash": "0", "vocab": 9}
    cases = [
        ("{}", r"not readable \(no step in it\)"),
        (json.dumps(record | {"step": 5}), "is the one of step 5"),
        (json.dumps(record | {"wandb": "../x"}), r"wandb is '\.\./x', which cannot be"),
        (json.dumps(record | {"usual_loss": math.inf}), "usual_loss is inf, which cannot be"),
    ]
    for words, message in cases:
        file.write_text(words)
        with pytest.raises(UserError, match=f"checkpoint.json: {message}"):
            read_record(file.parent)


def forget_sums(path):
    """As checkpoints were written before they had sums, with as little as every reader needs."""
    record = read_record(path)
    old = {key: record[key] for key in ("step", "config_hash", "vocab")}
    (path / "checkpoint.json").write_text(json.dumps(old))


def test_a_checkpoint_without_sums_is_read_with_a_note(grid, corpus, trained, tmp_path, caplog):
    folder = copy_of(trained, tmp_path)
    forget_sums(folder / "global_step4")
    caplog.set_level("INFO")
    note = "global_step4: written before checkpoints had sums, so its files are not verified"
    load_for_evaluation(folder)
    train(settings(corpus, folder, "train_iters=5"), grid)
    assert [message.endswith(note) for message in caplog.messages].count(True) == 2
    assert read_record(folder / "global_step5")["windows"] == 5 * 4


def test_an_edited_configuration_is_noticed(trained, tmp_path):
    path = copy_of(trained, tmp_path) / "global_step4" / "config.yml"
    path.write_text(path.read_text().replace("pos_emb: mep_param", "pos_emb: mep_xxxxx"))
    with pytest.raises(UserError, match=r"config.yml: was changed after it was written"):
        load_for_evaluation(path.parent)
    path.write_text(path.read_text().replace("pos_emb: mep_xxxxx", "pos_emb: mep_free"))
    forget_sums(path.parent)
    with pytest.raises(UserError, match=r"its hash is \w+, the checkpoint says \w+ - it was edit"):
        load_for_evaluation(path.parent)


@pytest.fixture(scope="module")
def three(grid, corpus, tmp_path_factory):
    """A run with checkpoints of steps 1, 2 and 3; not to be changed."""
    folder = tmp_path_factory.mktemp("three")
    train(settings(corpus, folder, "train_iters=3", "save_interval=1"), grid)
    return folder


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_damaged_checkpoint_is_refused_or_replaced_by_the_newest_good_one(
    grid, corpus, three, tmp_path, caplog
):
    folder = copy_of(three, tmp_path)
    flip(folder / "global_step3/mp_rank_00_model_states.pt")
    flip(folder / "global_step2/model.safetensors")
    fault = f"{folder}/global_step3/mp_rank_00_model_states.pt: was changed after it was written"
    good = f"{folder}/global_step1"
    with pytest.raises(UserError) as refused:
        train(settings(corpus, folder), grid)
    assert str(refused.value) == (
        f"{fault} - the newest good checkpoint of the run is {good}:"
        f" load={good} or load_fallback=true takes it"
    )
    assert load_for_evaluation(folder)[2]["step"] == 3, "it does not read the engine's state"
    train(settings(corpus, folder, "load_fallback=true", "train_iters=3"), grid)
    assert f"{fault}; load_fallback: continuing from {good}" in caplog.messages
    assert load_for_evaluation(folder)[2]["step"] == 3
    surplus = folder / "global_step3/zero_pp_rank_1_mp_rank_00_optim_states.pt"
    surplus.touch()
    with pytest.raises(UserError, match=rf"{surplus}: is not of this checkpoint"):
        train(settings(corpus, folder), grid)


def test_a_run_whose_only_checkpoint_lost_its_record_does_not_start_anew(
    grid, corpus, trained, tmp_path
):
    folder = copy_of(trained, tmp_path)
    (folder / "global_step4/checkpoint.json").unlink()
    for _ in range(2):
        message = r"global_step4/checkpoint.json: is missing - no other checkpoint"
        with pytest.raises(UserError, match=message):
            train(settings(corpus, folder), grid)
        (folder / "latest").unlink(missing_ok=True)
    with pytest.raises(UserError, match=r"holds a checkpoint of step 4 already"):
        train(settings(corpus, folder, f"load={trained}"), grid)


def test_an_odd_latest_is_a_warning_with_the_step_that_is_used(three, tmp_path, caplog):
    folder = copy_of(three, tmp_path)
    (folder / "global_step9").mkdir()  # an empty folder is no checkpoint
    pointer = folder / "latest"
    cases = [
        (b"global_step8\n", "names global_step8, which is not there", 3),
        (b"\xff\x00\x80", "is damaged (it holds b'\\xff\\x00\\x80')", 3),
        (b"global_step2", "is older than other checkpoints there (3)", 2),
        (None, "is missing", 3),
    ]
    for content, note, step in cases:
        pointer.unlink()
        if content is not None:
            pointer.write_bytes(content)
        assert load_for_evaluation(folder)[2]["step"] == step
        assert f"{pointer}: {note}; step {step} is used" in caplog.messages


# --- writing --------------------------------------------------------------------------------------


def test_checkpoints_are_written_at_the_steps_of_gpt_neox():
    cases = [
        ([], []),
        (["checkpoint_factor=30"], [30, 60, 90]),
        (["checkpoint_scale=log", "checkpoint_factor=3"], [1, 3, 9, 27, 81]),
        (["extra_save_iters=[0, 5]", "save_interval=50"], [0, 5, 50, 100]),
    ]
    for words, steps in cases:
        config = load([], tiny("train_iters=100", *words))
        assert [step for step in range(101) if is_saved(step, config.checkpoint)] == steps


@pytest.mark.parametrize("how", ["precision=fp32", "zero_optimization.stage=3"])
def test_weights_that_are_not_finite_are_not_saved(grid, tmp_path, how):
    run = trainer(grid, "pos_emb=alibi", how)
    train_step(run, [text(1)[0]])
    checkpoint.save(run, tmp_path, {"vocab": 61})
    before = sorted(path.name for path in tmp_path.iterdir())
    train_step(run, [text(1)[0]])
    optimizer = run.engine.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    state = next(iter(optimizer.state.values()))
    state["exp_avg_sq"].view(-1)[3] = math.inf
    with pytest.raises(UserError) as fault:
        checkpoint.save(run, tmp_path, {"vocab": 61})
    assert str(fault.value) == (
        f"save: not finite after step 2: exp_avg_sq 0 - nothing was saved, {tmp_path}/global_step1"
        " stays; lower optimizer.params.lr, raise warmup, or use precision: fp32"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", ["save_file", "torch.save", "write_record", "write_text"])
def test_a_file_that_cannot_be_written_leaves_the_earlier_checkpoint(
    grid, tmp_path, monkeypatch, name
):
    run = trainer(grid, "pos_emb=alibi", "zero_optimization.stage=1")
    train_step(run, [text(1)[0]])
    checkpoint.save(run, tmp_path, {"vocab": 61})
    before = sorted(path.name for path in tmp_path.iterdir())
    train_step(run, [text(1)[0]])

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    where = torch if name == "torch.save" else write
    monkeypatch.setattr(where, name.removeprefix("torch."), full)
    with pytest.raises(
        UserError,
        match=r"save: .*partial_step2 cannot be written \(No space left on device; [\d.]+ GiB were"
        r" free\) - make room or save elsewhere; .*global_step1 stays",
    ):
        checkpoint.save(run, tmp_path, {"vocab": 61})
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == (before if name != "write_text" else [before[0], "global_step2", *before[1:]])


# --- which ones stay ------------------------------------------------------------------------------


def keeper(folder, count, *, started_at=None, record=None):
    asked = Checkpoint(keep_last_n_checkpoints=count, extra_save_iters=(0, 4))
    return Keeper(folder, asked, started_at=started_at, record=record or {})


def follow(one, losses, saves=()):
    """The run of these losses that saves after some steps, as the training loop follows it."""
    for step, loss in losses.items():
        one.follow([(step, loss)])
        if step in saves:
            (one.folder / f"global_step{step}").mkdir(parents=True)
            (one.folder / f"global_step{step}/checkpoint.json").write_text("{}")
            one.wrote(step)


@pytest.mark.parametrize("count", [1, 2])
def test_an_explosion_never_deletes_the_last_good_checkpoint(tmp_path, caplog, count):
    one = keeper(tmp_path, count)
    losses = {1: 5.0, 2: 4.0, 3: 3.9, 4: 3.8, 5: 3.9, 6: 9e4, 7: 8e4, 8: 1e5, 9: 7e4, 10: 9e4}
    follow(one, losses, {2, 3, 5, 6, 7, 9})
    # Step 5 exploded: the loss after it is the first bad one.
    assert steps_in(tmp_path) == [3, *[6, 7, 9][-count:]]
    assert one.facts["proven"] == 3
    assert "step 6: loss 9e+04 after 4.05: global_step5 follows an exploded update" in caplog.text
    resumed = keeper(tmp_path, 1, started_at=9, record=one.facts)
    follow(resumed, {10: 1e6, 11: 1e6}, {11})
    assert steps_in(tmp_path) == [3, 11]
    follow(resumed, {12: 4.0})
    assert steps_in(tmp_path) == [11], "the update recovered"


def test_a_run_that_was_set_back_deletes_nothing_newer_and_not_what_proved_good(
    grid, corpus, tmp_path
):
    train(settings(corpus, tmp_path, "save_interval=2"), grid)
    (tmp_path / "latest").write_text("global_step2")
    train(settings(corpus, tmp_path, "train_iters=4", "keep_last_n_checkpoints=1"), grid)
    assert latest_step(tmp_path) == 4
    assert steps_in(tmp_path) == [2, 4, 6, 8], "no loss was computed from step 4"
    train(settings(corpus, tmp_path, "train_iters=5", "keep_last_n_checkpoints=1"), grid)
    assert steps_in(tmp_path) == [4, 5, 6, 8]


def test_weights_alone_can_be_evaluated_and_say_what_resuming_lacks(
    grid, corpus, three, tmp_path, caplog
):
    folder = copy_of(three, tmp_path)
    keep_weights_only(folder)
    for step in (1, 2, 3):
        left = {path.name for path in (folder / f"global_step{step}").iterdir()}
        assert left == {"checkpoint.json", "config.yml", "model.safetensors"}
    assert load_for_evaluation(folder)[2]["step"] == 3
    caplog.set_level("INFO")
    assert train(settings(corpus, folder, "train_iters=3"), grid) == folder / "global_step3"
    assert "step 3 of 3: nothing left to train" in caplog.messages
    with pytest.raises(UserError, match=r"holds weights only, .* finetune=true .*no_load_optim"):
        train(settings(corpus, folder, "train_iters=4"), grid)
    train(settings(corpus, folder, "train_iters=4", "no_load_optim=true"), grid)
    assert latest_step(folder) == 4
