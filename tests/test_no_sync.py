"""Between two log lines the host reads nothing from the device, so it never waits for it.

On the CPU the calls of our own lines are watched, those that can be told without a device; on a GPU
torch itself says which lines wait.
"""

import sys
import warnings
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.support import ROOT

pytest.importorskip("deepspeed")
pytest.importorskip("pydantic")
from megatron.training.loop import train
from megatron.training.trainer import Trainer
from tests.training import conftest

grid = conftest.grid
settings = conftest.settings

READS = {
    Tensor.item,
    Tensor.tolist,
    Tensor.cpu,
    Tensor.numpy,
    Tensor.nonzero,
    Tensor.__bool__,
    Tensor.__float__,
    Tensor.__int__,
    Tensor.__index__,
    torch.nonzero,
    torch.equal,
    torch.allclose,
}
"""What needs the values of a tensor on the host."""
FROM_THE_HOST = {torch.tensor, torch.as_tensor}
"""What copies to a device, and waits for it, where one is given."""
PACKAGE = ROOT / "megatron"


class Watching(TorchFunctionMode):
    """Notes where this package reads from a device or writes to it; not what DeepSpeed does."""

    def __init__(self, places):
        self.places = places

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        copies = func in FROM_THE_HOST and kwargs.get("device") is not None
        if func in READS or copies:
            place = self._place()
            if place is not None:
                self.places.append(f"{place}: {func.__name__}")
        return func(*args, **kwargs)

    @staticmethod
    def _place():
        """Our line that calls, or None where another package does."""
        frame = sys._getframe(2)
        while "/torch/" in frame.f_code.co_filename:
            frame = frame.f_back
        path = Path(frame.f_code.co_filename)
        return f"{path.name}:{frame.f_lineno}" if path.is_relative_to(PACKAGE) else None


@contextmanager
def warned(places):
    """The same on a GPU, where torch itself says which lines wait."""
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    torch.cuda.set_sync_debug_mode("default")
    for warning in caught:
        if Path(warning.filename).is_relative_to(PACKAGE):
            places.append(f"{warning.filename}:{warning.lineno}: {warning.message}")


def between_logs(monkeypatch, watching):
    """Watch from the end of step 2 to the end of step 5."""
    stack = ExitStack()

    train_step = Trainer.train_step

    def step(trainer, micro_batches):
        result = train_step(trainer, micro_batches)
        if trainer.step == 2:
            stack.enter_context(watching)
        if trainer.step == 5:
            stack.close()
        return result

    monkeypatch.setattr(Trainer, "train_step", step)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "kind", [Watching, pytest.param(warned, marks=pytest.mark.gpu)], ids=["calls", "gpu"]
)
def test_no_step_between_two_log_lines_waits_for_the_device(
    grid, corpus, tmp_path, monkeypatch, kind, precision
):
    places = []
    between_logs(monkeypatch, kind(places))
    more = ["train_iters=6", "save_interval=0", "log_interval=6", f"precision={precision}"]
    train(settings(corpus, tmp_path, *more), grid)
    assert places == []


def test_a_value_that_is_read_is_noticed(grid, corpus, tmp_path, monkeypatch):
    places = []
    between_logs(monkeypatch, Watching(places))
    more = ["train_iters=6", "save_interval=0", "log_interval=1"]
    train(settings(corpus, tmp_path, *more), grid)
    assert any("loop.py" in place for place in places)
