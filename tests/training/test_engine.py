"""What DeepSpeed's engine does to the model: precision, ZeRO, accumulation, clipping, floors."""

import math
import shutil
from dataclasses import replace

import pytest
import torch

from megatron.attention import BACKENDS, COMPUTED
from megatron.attention.eager import eager
from megatron.config import load
from megatron.errors import UserError
from megatron.model import from_config
from megatron.training import trainer as trainer_module
from megatron.training.checkpoint import full_weights
from megatron.training.trainer import Trainer, is_compiled
from tests.encodings import every_signature
from tests.support import of_encoding
from tests.training.conftest import VOCAB, text, tiny, trainer


def losses(run: Trainer, steps: int) -> list[float]:
    return [run.train_step([batch]).loss.item() for batch in text(steps)]


@pytest.fixture(scope="module")
def float32_losses(grid) -> list[float]:
    """Losses of float32 without ZeRO."""
    return losses(trainer(grid, "pos_emb=mep_param"), 25)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bfloat16_trains_like_float32_within_noise_at_every_zero_stage(grid, float32_losses, stage):
    zero = f"zero_optimization.stage={stage}"
    sharded = losses(trainer(grid, "pos_emb=mep_param", zero), 6)
    assert sharded == pytest.approx(float32_losses[:6], rel=1e-4)
    rounded = losses(trainer(grid, "pos_emb=mep_param", zero, "precision=bf16"), 25)
    assert float32_losses[-1] < 0.8 * float32_losses[0]
    assert rounded == pytest.approx(float32_losses, rel=1e-2)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", ["kerple_bias_wht", "mep_param_t5"])
def test_learned_kernels_act_with_their_float32_values_although_the_engine_rounds_them(
    grid, name, stage
):
    run = trainer(grid, f"pos_emb={name}", "precision=bf16", f"zero_optimization.stage={stage}")
    losses(run, 5)
    exact = from_config(run.config, VOCAB)
    exact.load_state_dict(full_weights(run))
    for hook in ("distance_bias", "distance_weight"):
        trained, evaluated = (
            getattr(run.model.position, hook)(16384),
            getattr(exact.position, hook)(16384),
        )
        assert (trained is None) == (evaluated is None)
        if evaluated is not None:
            torch.testing.assert_close(trained, evaluated, rtol=0, atol=0)
    parameter = next(run.model.position.parameters())
    assert (
        parameter.dtype == torch.bfloat16
    )  # the engine did cast it: the float32 value is not the stored one


@pytest.mark.parametrize("too", [False, True])
def test_weight_decay_acts_on_matrices_and_on_the_encoding_if_asked(grid, too):
    run = trainer(grid, "pos_emb=mep_param_t5", "weight_decay=0.5", f"pos_emb_weight_decay={too}")
    groups = run.engine.optimizer.param_groups
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    for name, parameter in run.model.named_parameters():
        spared = (
            not too if name.startswith("positions.") else name.endswith("bias") or "norm" in name
        )
        assert decay[id(parameter)] == (0.0 if spared else 0.5), name


def test_a_broken_backend_is_found_before_it_is_compiled(grid, monkeypatch):
    model = from_config(load([], tiny("pos_emb=alibi")), VOCAB)

    def a_key_too_far(q, k, v, terms):
        return eager(q, k, v, replace(terms, bias=terms.bias.roll(1, dims=1)))

    monkeypatch.setitem(BACKENDS, "planted", a_key_too_far)
    monkeypatch.setitem(COMPUTED, "planted", COMPUTED["sdpa"])
    monkeypatch.setattr(type(model), "compile_layers", lambda *_: None)
    monkeypatch.setattr(trainer_module, "is_compiled", lambda *_: True)
    model.use_attention(replace(model.attention, attention_backend="planted"))
    with pytest.raises(UserError, match="planted is wrong"):
        Trainer(load([], tiny("train_iters=1", "pos_emb=alibi", "torch_compile=true")), model, grid)


@every_signature
def test_training_leaves_learned_numbers_float32_and_within_their_bounds(grid, name):
    run = trainer(grid, *of_encoding(name), "precision=bf16")
    assert all(math.isfinite(loss) for loss in losses(run, 2))
    position = run.model.position
    for key, value in position.learned().items():
        path, _, name_in_module = key.rpartition(".")
        low, high = position.get_submodule(path).bounds.get(name_in_module, (-math.inf, math.inf))
        assert value.dtype == torch.float32
        assert ((value >= low) & (value <= high)).all()


def test_auto_compiles_on_cuda_alone_and_goes_on_without_a_compiler(caplog):
    assert not is_compiled(load([], tiny()), torch.device("cpu"))
    nowhere = torch.device("cuda", torch.cuda.device_count())  # whose compiler cannot work
    for words in (["seq_length_schedule=[[32, 2]]"], ["zero_optimization.stage=3"]):
        assert not is_compiled(load([], tiny("train_iters=9", *words)), nowhere)
    assert "torch_compile" not in caplog.text
    assert not is_compiled(load([], tiny()), nowhere)
    [warning] = [x.getMessage() for x in caplog.records if x.name == "megatron.training.trainer"]
    assert warning.startswith("torch_compile: no compiler works on cuda: ")


def test_a_compiler_that_is_asked_for_and_missing_is_one_message(grid):
    torch._dynamo.reset()
    without = {"cpp.cxx": ("/no/compiler",), "force_disable_caches": True}
    with (
        torch._inductor.config.patch(without),
        pytest.raises(
            UserError,
            match=r"torch_compile: no compiler works on cpu: .* or set torch_compile to false",
        ),
    ):
        trainer(grid, "torch_compile=true")


@pytest.mark.campaign
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("name", ["mep_param", "rotary", "fox"])
def test_compiled_and_recomputed_layers_give_the_losses_of_plain_ones(grid, name):
    words = ["num_layers=2", f"pos_emb={name}"]
    plain = losses(trainer(grid, *words), 3)
    recomputed, compiled = "checkpoint_activations=true", "torch_compile=true"
    for keys in ([recomputed], [compiled], [recomputed, compiled, "zero_optimization.stage=1"]):
        assert losses(trainer(grid, *words, *keys), 3) == pytest.approx(plain, rel=1e-5)
