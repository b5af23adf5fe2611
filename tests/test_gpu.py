"""What only a CUDA device can show: the CPU's numbers in every precision; `make gpu-check` runs these alone."""

import math

import pytest
import torch

from megatron.attention import BACKENDS, attention
from megatron.config import load
from megatron.model import from_config
from megatron.positions import REGISTRY

pytestmark = pytest.mark.gpu
MIX = ["pos_emb_args.kernels=[exp, kerple_log]"]  # the one option without a default


def settings(name: str, *more: str) -> list[str]:
    shape = ["num_layers=2", "hidden_size=256", "num_attention_heads=4", "seq_length=128"]
    return [*shape, f"pos_emb={name}", *(MIX if name == "mep" else []), *more]


@pytest.mark.parametrize("backend", sorted(BACKENDS))
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2), (torch.float16, 5e-3)])
@pytest.mark.parametrize("weighted", [False, True])
def test_attention_and_its_gradients_are_those_of_the_definition_in_float64(backend, dtype, tolerance, weighted):
    q, k, v = torch.randn(3, 2, 4, 700, 64, device="cuda", dtype=dtype)
    bias = -torch.rand(4, 1, device="cuda") * torch.arange(700, device="cuda") / 50
    weight = torch.rand(4, 700, device="cuda") if weighted else None
    results = []
    for chosen, precise in ((backend, False), ("eager", True)):
        leaves = [x.detach().clone() for x in (q, k, v, bias, *([weight] if weighted else []))]
        leaves = [x.double().requires_grad_() if precise else x.requires_grad_() for x in leaves]
        out = attention(*leaves[:4], weight=leaves[4] if weighted else None, backend=chosen)
        results.append([out, *torch.autograd.grad(out.double().square().sum(), leaves)])
    for ours, exact in zip(*results, strict=True):
        assert (ours.double() - exact).norm() / exact.norm() < tolerance


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_every_encoding_gives_the_cpus_logits(name):
    model = from_config(load([], settings(name)), vocab=500).eval()
    ids = torch.randint(500, (2, 128))
    with torch.no_grad():
        expected = model(ids)
        torch.testing.assert_close(model.cuda()(ids.cuda()).cpu(), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", ["mep_free", "kerple_log", "rotary"])
def test_a_window_of_16384_tokens_needs_little_memory(name):
    model = from_config(load([], settings(name)), vocab=500).eval().bfloat16().cuda()
    ids = torch.randint(500, (1, 16385), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    with torch.inference_mode():
        assert model(ids[:, :-1], labels=ids[:, 1:]).isfinite().all()
    assert torch.cuda.max_memory_allocated() < 2 * 2**30


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_the_engine_trains_every_encoding_in_every_precision(name, precision):
    pytest.importorskip("deepspeed")
    from megatron.parallel.grid import connect
    from megatron.training.trainer import Trainer

    more = [f"precision={precision}", "train_iters=60", "optimizer.params.lr=2e-3", "train_micro_batch_size_per_gpu=8"]
    config = load([], settings(name, *more, "fp16.initial_scale_power=12"))
    trainer = Trainer(config, from_config(config, 64), connect())
    rows = torch.arange(129).repeat(8, 1) * torch.tensor([3, 5, 7, 9, 11, 13, 15, 17])[:, None]
    losses = [float(trainer.train_step([rows % 64])["loss"]) for _ in range(60)]
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < 0.7 * losses[0]
