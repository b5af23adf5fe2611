"""A resumed run repeats the uninterrupted one, also with another engine; what may be resumed."""

import shutil
import sys
from pathlib import Path

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from safetensors.torch import load_file, save_file

from megatron.checkpoints.manifest import entry_of, read_record, write_record
from megatron.checkpoints.saved import latest_step, with_parent
from megatron.config import Config, load
from megatron.errors import UserError
from megatron.training import trainer as engine
from megatron.training.loop import train
from megatron.training.optimizer import build_optimizer, learning_rate
from megatron.training.resume import continue_scale
from megatron.training.start import Saved, Start, checkpoint_to_continue, with_schedule
from tests.training.conftest import check_same, copy_of, interrupted, records, settings, tiny

LLAMA = ["norm=rmsnorm", "activation=swiglu", "num_key_value_heads=2", "qk_norm=true"]
STAGES = [
    "seq_length_schedule=[{until: 4, seq_length: 16, window: 8},"
    " {until: 6, window_layers: [16, null], pos_emb_args: {base: 500}},"
    " {logn_scale: true, pos_emb_args: {scaling: yarn, factor: 4, original_length: 16}}]"
]
"""The run is broken where the second begins."""
FROZEN = """
import torch
from megatron.positions import register
from megatron.positions.base import DistanceBias

@register("frozen_slope")
class FrozenSlope(DistanceBias):
    def __init__(self, shape):
        super().__init__(shape)
        slope = torch.full((shape.heads,), 0.125)
        self.slope = torch.nn.Parameter(slope, requires_grad=False)

    def log_kernel(self, distance):
        return -self.bounded("slope")[:, None] * distance
"""
DOCUMENTS = ["reset_attention_mask=true", "reset_position_ids=true", "eod_mask_loss=true"]


@pytest.mark.parametrize(
    "how",
    [
        ["num_workers=1"],
        ["precision=bf16", "gradient_accumulation_steps=2"],
        ["zero_optimization.stage=2"],
        ["zero_optimization.stage=3", *LLAMA],
        ["precision=bf16", "zero_optimization.stage=3"],
        ["checkpoint_activations=true", *DOCUMENTS],
        ["optimizer.type=Muon", "layers=[kda, attention]"],
        ["seq_length_schedule=[[16, 3], [32, 6]]"],
        [*STAGES, "pos_emb=rotary", "zero_optimization.stage=2"],
    ],
    ids=[
        "fp32",
        "bf16",
        "zero2",
        "zero3-llama",
        "bf16-zero3",
        "documents",
        "muon-hybrid",
        "lengths",
        "stages",
    ],
)
def test_a_resumed_run_repeats_the_uninterrupted_one_to_the_last_bit(grid, corpus, tmp_path, how):
    """Each way has dropout and a learned encoding, validations and lines between checkpoints."""
    how = [*how, "eval_interval=4", "eval_iters=1", "log_interval=3"]
    straight = tmp_path / "straight"
    train(settings(corpus, straight, *how), grid)
    broken = interrupted(straight, 4, tmp_path / "broken")
    train(settings(corpus, broken, *how), grid)
    for kind, steps in (("train", {3, 6, 8}), ("valid", {4, 8})):
        assert records(straight, kind).keys() == steps
        check_same(straight, broken, kind)


APEX = """
import torch

class FusedAdam(torch.optim.Optimizer):
    def __init__(self, params, lr, betas, eps):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = count = group.get("step", 0) + 1
            rate, (slow, fast) = group["lr"], group["betas"]
            for p in group["params"]:
                state = self.state[p]
                for key in ("exp_avg", "exp_avg_sq"):
                    state.setdefault(key, torch.zeros_like(p))
                mean = state["exp_avg"].lerp_(p.grad, 1 - slow) / (1 - slow**count)
                square = state["exp_avg_sq"].lerp_(p.grad**2, 1 - fast) / (1 - fast**count)
                p.sub_(rate * (mean / (square.sqrt() + group["eps"]) + group["weight_decay"] * p))
"""
"""Stands for NVIDIA's, whose groups count the steps. Its place says which kernels are installed."""


def test_apex_is_used_where_its_kernels_are_and_resumes_with_torch_and_the_other_way(
    grid, corpus, tmp_path, monkeypatch
):
    words = ["train_iters=4", "save_interval=2", "weight_decay=0.1", "gradient_clipping=0"]
    plain, straight = tmp_path / "plain", tmp_path / "straight"
    train(settings(corpus, plain, *words), grid)
    (tmp_path / "amp_C.py").touch()
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "optimizers.py").write_text(APEX)
    cuda = torch.device("cuda")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        patch.setattr(engine, "build_optimizer", lambda *how: build_optimizer(*how[:2], cuda))
        train(settings(corpus, straight, *words), grid)
        assert "apex.optimizers" in sys.modules
        again = interrupted(straight, 2, tmp_path / "again")
        train(settings(corpus, again, *words), grid)
        check_same(straight, again)
        from_torch = interrupted(plain, 2, tmp_path / "from_torch")
        train(settings(corpus, from_torch, *words), grid)
    to_torch = interrupted(straight, 2, tmp_path / "to_torch")
    train(settings(corpus, to_torch, *words), grid)
    for folder in (straight, from_torch, to_torch):
        for step, record in records(plain).items():
            assert records(folder)[step]["loss"] == pytest.approx(record["loss"], abs=1e-5)


# --- a state that does not fit --------------------------------------------------------------------


@pytest.mark.parametrize("how", ["optimizer.type=Adam", "zero_optimization.stage=1"])
def test_a_state_that_does_not_fit_the_weights_is_refused_before_a_step(
    grid, corpus, trained, tmp_path, how
):
    """torch's fused Adam reads and writes outside of averages that are too small."""
    folder = copy_of(trained, tmp_path)
    file = folder / "global_step4/optimizer.safetensors"
    state = load_file(file)
    name = "exp_avg.layers.0.mlp.dense_h_to_4h.weight"
    average = state.pop(name)
    for tensors in (state, state | {name: average.mT.contiguous()}):
        save_file(tensors, file)
        record = read_record(file.parent)
        record["files"][file.name] = entry_of(file)
        write_record(file.parent, record)
        with pytest.raises(UserError, match=r"the optimizer's state cannot be .*dense_h_to_4h"):
            train(settings(corpus, folder, how), grid)


# --- what goes on; tests/bad_inputs has what is refused -------------------------------------------


def test_a_run_goes_on_with_its_own_text_wherever_that_lies(grid, corpus, trained, tmp_path):
    """tests/bad_inputs has the refusal."""
    folder, moved = copy_of(trained, tmp_path), tmp_path / "moved"
    for suffix in (".idx", ".bin"):  # without its card
        shutil.copy(f"{corpus}{suffix}", f"{moved}{suffix}")
    train(settings(moved, folder, "train_iters=5"), grid)
    train(settings(moved, tmp_path / "new", f"load={trained}", "split=8,1,1"), grid)


def test_a_run_that_saves_nothing_goes_on_from_the_folder_it_is_started_in(trained, monkeypatch):
    monkeypatch.chdir(trained)
    config = load([], tiny("load=.", "data_path=text"))
    path = checkpoint_to_continue(with_parent(config))
    assert path is not None
    assert path.resolve() == trained / "global_step4"


def test_another_number_of_ranks_goes_on_where_the_windows_of_a_step_are_given(
    grid, corpus, trained, tmp_path
):
    folder = copy_of(trained, tmp_path)
    path = folder / "global_step4"
    write_record(path, read_record(path) | {"data_ranks": 2, "windows_per_step": 8})
    train(settings(corpus, folder, "train_batch_size=4", "train_iters=5"), grid)
    assert latest_step(folder) == 5


# --- the optimizer's settings and schedule --------------------------------------------------------

SHAPE = ["num_layers=1", "hidden_size=8", "num_attention_heads=2", "seq_length=8"]


def scheduled(*words: str) -> Config:
    return load([], [*SHAPE, "train_iters=12", "optimizer.params.lr=0.5", "min_lr=0.1", *words])


def continued(config: Config, step: int = 8) -> Config:
    before = Saved(Path("run"), scheduled("train_iters=8"), {"step": step})
    return with_schedule(config, Start(before=before))


def test_more_steps_ask_whether_the_schedule_is_stretched(caplog):
    caplog.set_level("INFO")
    with pytest.raises(UserError, match=r"lr_decay_iters: follows train_iters = 12 but was 8 .*"):
        continued(scheduled())
    old = continued(scheduled("lr_decay_iters=8"))
    assert learning_rate(10, old.optimizer) == pytest.approx(0.1)
    for words in ("lr_decay_iters=12", "override_lr_scheduler=true"):
        assert learning_rate(10, continued(scheduled(words)).optimizer) > 0.11
    shorter = scheduled("train_iters=6")
    assert continued(shorter) is with_schedule(shorter, Start()) is shorter
    with pytest.raises(UserError, match=r"override_lr_scheduler .* keep one of them"):
        scheduled("override_lr_scheduler=true", "use_checkpoint_lr_scheduler=true")


def test_a_decay_branches_from_a_stable_run_and_has_its_losses_up_to_the_decay(
    grid, corpus, tmp_path
):
    stable, branch = tmp_path / "stable", tmp_path / "branch"
    wsd = ["lr_decay_style=wsd", "warmup=0", "override_lr_scheduler=false"]
    train(settings(corpus, stable, *wsd), grid)
    words = [f"load={stable / 'global_step4'}", "train_iters=7", "lr_wsd_decay_iters=2"]
    train(settings(corpus, branch, *wsd, *words), grid)
    parent, branched = records(stable), records(branch)
    for step in (5, 6):  # a loss is that before its step's update
        assert branched[step]["loss"] == parent[step]["loss"]
    rates = [branched[step]["lr"] / 3e-3 for step in (5, 6, 7)]
    assert rates == pytest.approx([1, 2 * 0.5 ** (1 / 3) - 1, 2 * 0.5 ** (2 / 3) - 1])
    assert branched[7]["loss"] != parent[7]["loss"]
    # The order of the text is the stable run's, also for whoever continues the branch.
    assert read_record(branch / "global_step7")["planned"] == 8 * 4
    with pytest.raises(UserError, match=r"lr_decay_iters: follows train_iters = 9 but was 7 "):
        train(settings(corpus, branch, *wsd, "train_iters=9", "lr_wsd_decay_iters=1"), grid)


SCHEDULE_OF_PARENT = "use_checkpoint_lr_scheduler=true override_lr_scheduler=false"


@pytest.mark.parametrize("how", ["", "no_load_optim=true", SCHEDULE_OF_PARENT])
def test_the_same_command_goes_on_with_a_branch_after_a_kill_also_without_its_parent(
    grid, corpus, trained, tmp_path, how
):
    parent = copy_of(trained, tmp_path)
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    words = [f"load={parent}", "train_iters=9", "lr_decay_iters=9", "optimizer.params.lr=2e-3"]
    words += how.split()
    train(settings(corpus, straight, *words), grid)
    config = settings(corpus, broken, *words, "exit_interval=6")
    train(config, grid)
    for other in ("seed=7", f"load={straight / 'global_step9'}"):
        with pytest.raises(UserError, match="step 6 already of another configuration or load than"):
            train(settings(corpus, broken, *words, other), grid)
    shutil.rmtree(parent)
    for _ in range(2):  # the second time nothing is left
        train(settings(corpus, broken, *words), grid)
    check_same(straight, broken)


def test_the_checkpoints_schedule_is_kept_if_that_is_said():
    words = ["use_checkpoint_lr_scheduler=true", "optimizer.params.lr=0.9", "warmup=0.5"]
    config = continued(scheduled(*words, "weight_decay=0.3", "lr_decay_style=linear"), 4)
    parent = scheduled("train_iters=8")
    for step in range(12):
        assert learning_rate(step, config.optimizer) == learning_rate(step, parent.optimizer)
    assert config.optimizer.weight_decay == 0.3


def test_a_loss_scale_goes_on_where_it_was_with_the_settings_of_the_new_configuration():
    scaler = DynamicLossScaler(2.0**8, 50, 2.0, 2, False)
    continue_scale(scaler, torch.tensor([2.0**16, 3, 1, 3]))
    assert (scaler.cur_scale, scaler.cur_iter, scaler.last_overflow_iter) == (2.0**16, 3, 1)
    assert (scaler.scale_window, scaler.min_scale, scaler.cur_hysteresis) == (50, 2.0, 2)


# --- another engine -------------------------------------------------------------------------------


def recipe(corpus: Path, save: Path, stage: int, *more: str, source: Path | None = None):
    """Eight windows a step on one rank, in two micro batches."""
    words = ["pos_emb=mep_param", "train_iters=8", "save_interval=4"]
    words += ["gradient_accumulation_steps=2", f"zero_optimization.stage={stage}"]
    words += [f"data_path={corpus}", f"save={save}"]
    if source is not None:
        words.append(f"load={source / 'global_step4'}")
    return tiny(*words, *more)


def losses(folder: Path) -> dict[int, float]:
    return {step: record["loss"] for step, record in records(folder).items() if step > 4}


def test_weight_decay_of_the_encoding_can_change(grid, corpus, tmp_path):
    """Parameters have numbers in torch's state; another order must not mix them up."""
    train(load([], recipe(corpus, tmp_path / "run", 0)), grid)
    more = ["pos_emb_weight_decay=true", "weight_decay=0"]
    new = tmp_path / "new"
    train(load([], recipe(corpus, new, 0, *more, source=tmp_path / "run")), grid)
    assert losses(new) == pytest.approx(losses(tmp_path / "run"), abs=1e-3)


@pytest.mark.parametrize("how", ["zero_optimization.stage=1", "precision=bf16"])
def test_a_frozen_number_of_an_encoding_is_saved_and_resumed(
    grid, corpus, tmp_path, own_registry, how
):
    path = tmp_path / "frozen.py"
    path.write_text(FROZEN)
    words = [how, "pos_emb=frozen_slope", "pos_emb_args={}", f"pos_emb_file={path}"]
    train(settings(corpus, tmp_path / "run", *words), grid)
    weights = load_file(tmp_path / "run" / "global_step8" / "model.safetensors")
    assert weights["positions.0.slope"].tolist() == [0.125] * 4
    broken = interrupted(tmp_path / "run", 4, tmp_path / "broken")
    train(settings(corpus, broken, *words), grid)
    check_same(tmp_path / "run", broken)


def test_another_optimizer_is_refused_or_starts_fresh(grid, corpus, trained, tmp_path):
    muon = "optimizer.type=Muon"
    folder = copy_of(trained, tmp_path)
    with pytest.raises(UserError, match="has no state of this optimizer"):
        train(settings(corpus, folder, muon), grid)
    train(settings(corpus, folder, muon, "train_iters=5", "no_load_optim=true"), grid)
    with pytest.raises(UserError, match="global_step5: has no state of this optimizer"):
        train(settings(corpus, folder, "zero_optimization.stage=1"), grid)
    train(settings(corpus, folder, muon, "train_iters=6", "pos_emb_weight_decay=true"), grid)


def test_a_checkpoint_continues_at_every_other_zero_stage(grid, corpus, tmp_path):
    """Averages are taken from each kind of engine and given to each."""
    for precision, tolerance in (("fp32", 1e-5), ("bf16", 1e-3)):
        kind = f"precision={precision}"
        straight, source = tmp_path / f"{precision}-0", tmp_path / f"{precision}-0"
        train(load([], recipe(corpus, straight, 0, kind)), grid)
        for stage, at in ((2, 4), (3, 5), (1, 6), (0, 7)):
            folder = tmp_path / f"{precision}-{stage}-{at}"
            start = f"load={source / f'global_step{at}'}"
            every = ["save_interval=1", f"exit_interval={at + 1}"]
            train(load([], recipe(corpus, folder, stage, kind, start, *every)), grid)
            loss, expected = records(folder)[at + 1]["loss"], records(straight)[at + 1]["loss"]
            assert loss == pytest.approx(expected, abs=tolerance), (precision, stage)
            source = folder
