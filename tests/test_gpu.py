"""Model and engine on a CUDA device; `make gpu-check` runs all gpu tests alone."""

import math

import pytest
import torch

from megatron.conformance.subject import VOCAB, Subject
from megatron.data.loader import batches
from tests.encodings import every_signature
from tests.support import NEEDED, of_encoding

pytestmark = pytest.mark.gpu


def subject(name):
    return Subject(name, NEEDED.get(name, {}), head_dim=64, train_length=128)


@every_signature
def test_every_encoding_gives_the_cpus_logits(name):
    model = subject(name).gpt()
    ids = torch.randint(VOCAB, (2, 128))
    with torch.no_grad():
        expected = model(ids)
        torch.testing.assert_close(model.cuda()(ids.cuda()).cpu(), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", ["mep_free", "kerple_log", "rotary"])
def test_a_window_of_16384_tokens_needs_little_memory(name):
    model = subject(name).gpt().bfloat16().cuda()
    ids = torch.randint(VOCAB, (1, 16385), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    with torch.inference_mode():
        assert model(ids[:, :-1], labels=ids[:, 1:]).isfinite().all()
    assert torch.cuda.max_memory_allocated() < 2 * 2**30


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@every_signature
def test_the_engine_trains_every_encoding_in_every_precision(name, precision):
    for package in ("deepspeed", "pydantic"):
        pytest.importorskip(package)
    from megatron.config import load
    from megatron.model import from_config
    from megatron.parallel.grid import connect
    from megatron.training.trainer import Trainer

    shape = [
        "num_layers=2",
        "hidden_size=256",
        "num_attention_heads=4",
        "seq_length=128",
        *of_encoding(name),
    ]
    more = [
        f"precision={precision}",
        "train_iters=60",
        "optimizer.params.lr=2e-3",
        "train_micro_batch_size_per_gpu=8",
    ]
    config = load([], [*shape, *more, "fp16.initial_scale_power=12"])
    trainer = Trainer(config, from_config(config, 64), connect())
    rows = torch.arange(129).repeat(8, 1) * torch.tensor([3, 5, 7, 9, 11, 13, 15, 17])[:, None]
    losses = [float(trainer.train_step([rows % 64]).loss) for _ in range(60)]
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < 0.7 * losses[0]


def test_batches_for_cuda_are_pinned():
    samples = [torch.arange(5).numpy() + 10 * i for i in range(8)]
    for workers in (0, 2):
        batch = next(batches(samples, 2, num_workers=workers, pin_memory=True))
        assert batch.is_pinned()
        assert batch.tolist() == [[0, 1, 2, 3, 4], [10, 11, 12, 13, 14]]
