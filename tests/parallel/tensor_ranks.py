"""What four ranks compute, two of which share each layer, beside one process alone.

tensor_ranks.py FILE CORPUS RUN FOLDER runs on all ranks. It writes how far gradients, norms and
losses differ, and continues RUN, a training of one rank, in folders of its own.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from megatron.config import Config, load
from megatron.errors import UserError
from megatron.model import GPT, from_config
from megatron.parallel.grid import Grid, connect
from megatron.training.checkpoint import full_weights
from megatron.training.loop import train
from megatron.training.optimizer import build_optimizer, learning_rate
from megatron.training.trainer import Trainer
from tests.encodings import SAMPLE
from tests.support import of_encoding
from tests.training.conftest import tiny

LENGTH, MICRO, STEPS = 24, 2, 3
SHAPE = [
    *("num_layers=2", "hidden_size=32", "num_attention_heads=4", f"seq_length={LENGTH}"),
    *("hidden_dropout=0", "precision=fp32", "train_iters=9", "optimizer.params.lr=3e-3"),
    *("gradient_clipping=0.05", f"train_micro_batch_size_per_gpu={MICRO}", "eval_interval=0"),
]
LLAMA = [
    *("norm=rmsnorm", "activation=swiglu", "num_key_value_heads=2", "qk_norm=true"),
    *("use_bias_in_attn_linear=false", "no_weight_tying=true", "checkpoint_activations=true"),
    *(
        "attention_gate=element",
        "softmax_type=learnable",
        "norm_placement=both",
        "clip_qkv=2",
    ),
    *("embedding_norm=true", "use_bias_in_output=true", "query_pre_attn_scalar=5"),
]
CONTINUED = ((0, 2), (2, 3), (2, 4), (3, 5), (3, 6), (1, 7))
"""ZeRO stages of one step each, and the checkpoint that it continues; the first is one rank's."""


def cases() -> Iterator[tuple[str, list[str]]]:
    """An encoding of each signature at one stage, and one model at all stages."""
    for index, name in enumerate(SAMPLE):
        yield name, [*of_encoding(name), f"zero_optimization.stage={index % 4}"]
    for stage in range(4):
        words = ["pos_emb=mep_param", f"zero_optimization.stage={stage}"]
        yield f"stage {stage}", [*words, *LLAMA]


def recipe(corpus: str, save: Path, load_from: Path | None, at: int, *more: str) -> Config:
    """A run up to a step, of two windows in each."""
    words = [f"data_path={corpus}", f"save={save}", "hidden_dropout=0", "pos_emb=kerple_log"]
    words += ["train_iters=9", "save_interval=1", f"exit_interval={at}", "gradient_clipping=0.3"]
    words += ["activation=swiglu", "num_key_value_heads=2", "train_micro_batch_size_per_gpu=1"]
    if load_from is not None:
        words.append(f"load={load_from}")
    return load([], tiny(*words, *more))


def windows(step: int, count: int) -> Tensor:
    draw = torch.Generator().manual_seed(step)
    return torch.randint(1, 61, (count, LENGTH + 1), generator=draw)


def model_of(config: Config, end_of_document: int | None = None) -> GPT:
    torch.manual_seed(0)
    model = from_config(config, 61, end_of_document)
    draw = torch.Generator().manual_seed(1)
    for parameter in model.parameters():  # so that no number of an encoding is at a special value
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=draw)
    return model


def gap(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, beside the largest number."""
    scale = theirs.abs().max().clamp(min=1e-3)
    return float(((ours - theirs).abs().max() / scale).item())


def alone(config: Config, data_ranks: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and norms of some steps by torch alone, and the gradients of the first.

    data_ranks: of the run that is compared, each of which has a seed and windows of its own
    """
    model = model_of(config)
    optimizer = build_optimizer(model, config.optimizer, torch.device("cpu"))
    numbers, gradients = [], {}
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config.optimizer)
        total = 0.0
        for rank, ids in enumerate(windows(step, MICRO * data_ranks).split(MICRO)):
            torch.manual_seed((config.training.seed * 1_000_003 + step) * data_ranks + rank)
            loss = model(ids[:, :-1], ids[:, 1:], mean=True) / data_ranks
            loss.backward()
            total += loss.item()
        if step == 0:
            for name, parameter in model.named_parameters():
                gradients[name] = parameter.grad.clone()
        most = config.optimizer.gradient_clipping
        norm = nn.utils.clip_grad_norm_(model.parameters(), most)
        optimizer.step()
        optimizer.zero_grad()
        numbers += [total, norm.item()]
    return numbers, gradients


def compare(grid: Grid, config: Config) -> dict[str, float]:
    from deepspeed.utils import safe_get_full_grad

    expected, gradients = alone(config, grid.data_ranks)
    run = Trainer(config, model_of(config), grid)
    rows = slice(grid.data_rank * MICRO, (grid.data_rank + 1) * MICRO)
    numbers, differences = [], {}
    engine_step = run.engine.step

    def step_after_comparing() -> None:
        """The engine's first step, before which its gradients are compared."""
        run.engine.step = engine_step
        for name, parameter in run.model.named_parameters():
            part = parameter.grad
            if config.parallel.zero_stage:
                part = safe_get_full_grad(parameter)
            whole = run.tensor.whole(name, part.detach())
            differences[name] = gap(whole, gradients[name])
        engine_step()

    run.engine.step = step_after_comparing
    for step in range(STEPS):
        result = run.train_step([windows(step, MICRO * grid.data_ranks)[rows]])
        numbers += [grid.mean(result.loss).item(), float(result.grad_norm)]
    for number, theirs in zip(numbers, expected, strict=True):
        differences["losses"] = max(differences.get("losses", 0), abs(number / theirs - 1))
    run.engine.destroy()
    return differences


def rounded(grid: Grid) -> list[bool]:
    """Whether each rank computes with the float32 values of an encoding in a bfloat16 engine."""
    words = ["pos_emb=kerple_log", "precision=bf16", "zero_optimization.stage=2"]
    config = load([], [*SHAPE, *words, "model_parallel_size=2"])
    run = Trainer(config, model_of(config), grid)
    for step in range(2):
        run.train_step([windows(step, MICRO)])
    saved = model_of(config)
    first, *later = grid.gather(full_weights(run))
    saved.load_state_dict(first)
    tables = [model.position.distance_bias(16384) for model in (run.model, saved)]
    run.engine.destroy()
    same = all(torch.equal(weights[name], first[name]) for weights in later for name in weights)
    return grid.gather(same and torch.equal(*tables))


if __name__ == "__main__":
    torch.set_num_threads(1)
    whole_grid = connect()
    grid = whole_grid.sharing(1, 2)
    file, corpus, source, folder = sys.argv[1:]
    results: dict = {"differences": {}, "refused": {}}
    for case, words in cases():
        try:
            config = load([], [*SHAPE, *words, "model_parallel_size=2"])
        except UserError as fault:
            results["refused"][case] = str(fault)
            continue
        results["differences"][case] = compare(grid, config)
    results["exact"] = rounded(grid)
    start = Path(source)
    for stage, at in CONTINUED:
        words = [f"zero_optimization.stage={stage}", "model_parallel_size=2"]
        save = Path(folder) / f"shared{at}"
        train(recipe(corpus, save, start / f"global_step{at}", at + 1, *words), whole_grid)
        start = save
    if grid.first:
        Path(file).write_text(json.dumps(results))
