"""What two ranks that share each text compute, beside one process alone: run on both ranks.

context_ranks.py FILE [stages] writes for each case how far losses and gradients differ: models over
one encoding of each signature, trainings over a few; with `stages` every encoding at every stage.
"""

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from megatron.config import Config, load
from megatron.errors import UserError
from megatron.model import GPT, from_config
from megatron.parallel.context import context_of
from megatron.parallel.grid import Grid, connect
from megatron.positions import REGISTRY
from megatron.training.optimizer import build_optimizer, learning_rate
from megatron.training.trainer import Trainer
from tests.encodings import FEW, SAMPLE
from tests.support import of_encoding

LENGTH, END, MICRO, STEPS = 32, 0, 2, 3
SHAPE = [
    *("num_layers=2", "hidden_size=32", "num_attention_heads=4", f"seq_length={LENGTH}"),
    *("tokenizer_type=CharLevelTokenizer", "hidden_dropout=0"),
]
TRAINED = [
    *("num_layers=2", "hidden_size=32", "num_attention_heads=4", f"seq_length={LENGTH}"),
    *("hidden_dropout=0", "precision=fp32", "train_iters=9", "optimizer.params.lr=3e-3"),
    *("gradient_clipping=0.05", f"train_micro_batch_size_per_gpu={MICRO}", "eval_interval=0"),
]
ENGINE = [
    *("train_iters=9", "optimizer.params.lr=3e-3", "gradient_clipping=0.05", "precision=fp32"),
    *("eval_interval=0", "eod_mask_loss=true"),
]
ENGINES = [
    *(("fox", "a2a", stage) for stage in (0, 3)),
    *(("mep_param", "all_gather", stage) for stage in (1, 2)),
]
"""Each ZeRO stage once; compare_stages has each with both exchanges."""
SINKS = "softmax_type=learnable"
GROUPS = ["linear_num_key_heads=2", "linear_num_value_heads=4", "linear_value_head_dim=12"]
OPTIONS = {
    "documents": ["pos_emb=rotary", "reset_attention_mask=true", "reset_position_ids=true"],
    "documents of a table": ["pos_emb=mep_param", "reset_attention_mask=true"],
    "log-n": ["pos_emb=kerple_log", "logn_scale=true"],
    "rotary with longrope": [
        "pos_emb=rotary",
        "pos_emb_args={scaling: longrope, original_length: 24, long_factor: [2, 2, 3, 4],"
        " short_factor: [1, 1, 1, 1]}",
    ],
    "grouped queries": [
        *(
            "pos_emb=rotary",
            "num_key_value_heads=2",
            "layers=gated_attention",
            "attention_gate=head",
        )
    ],
    "latents": [
        *("pos_emb=rotary", "layers=[mla, attention]", "qk_rope_head_dim=8", "v_head_dim=12"),
        *("reset_attention_mask=true", "reset_position_ids=true"),
    ],
    "latents of a bias by content": ["pos_emb=fox", "layers=mla", "q_lora_rank=12"],
    "windows": ["pos_emb_layers=[rotary, fox]", "window_layers=[8, null]", SINKS],
    "recomputed": ["pos_emb=fox", "checkpoint_activations=true"],
    "states": ["layers=[gated_delta, attention]", "allow_neg_eigval=true", *GROUPS],
    "states by feature": [
        *("layers=[kda, attention]", "checkpoint_activations=true", "linear_pos_emb=rotary"),
    ],
    "documents of states": [
        *("layers=[gated_delta, attention, kda]", "num_layers=3", "pos_emb=none"),
        *("reset_attention_mask=true", *GROUPS),
        *("reset_position_ids=true", "linear_pos_emb=rotary"),
    ],
}


def text(count: int, seed: int = 0) -> torch.Tensor:
    """[count, LENGTH + 1] ids, some of which end a document."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 61, (count, LENGTH + 1), generator=draw)
    return ids.masked_fill(torch.rand(ids.shape, generator=draw) < 0.1, END)


def windows(step: int) -> Tensor:
    draw = torch.Generator().manual_seed(step)
    return torch.randint(1, 61, (MICRO, LENGTH + 1), generator=draw)


def model_of(config: Config, end_of_document: int | None = END) -> GPT:
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


def cases() -> Iterator[tuple[str, list[str]]]:
    for name in filter(shared, SAMPLE):
        yield name, of_encoding(name)
    yield from OPTIONS.items()


def compare_models(grid, results: dict) -> None:
    contexts = {kind: context_of(grid, kind) for kind in ("a2a", "all_gather")}
    ids = text(2)
    for case, words in cases():
        config = load([], [*SHAPE, *words])
        alone = model_of(config).double()
        # A mean over the text: parts have as many targets each.
        loss = alone(ids[:, :-1], ids[:, 1:], mean=True)
        loss.backward()
        for kind, context in contexts.items():
            shared = model_of(config).double()
            shared.context = context
            own_loss = shared(ids[:, :-1], ids[:, 1:], mean=True)
            own_loss.backward()
            differences = [gap(grid.mean(own_loss.detach()), loss.detach())]
            for ours, theirs in zip(shared.parameters(), alone.parameters(), strict=True):
                assert (ours.grad is None) == (theirs.grad is None)
                if theirs.grad is not None:
                    differences.append(gap(grid.mean(ours.grad), theirs.grad))
            results["models"][f"{case}, {kind}"] = max(differences)


def alone(config: Config) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and norms of some steps by torch alone, and the gradients of the first."""
    model = model_of(config, None)
    optimizer = build_optimizer(model, config.optimizer, torch.device("cpu"))
    numbers, gradients = [], {}
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config.optimizer)
        ids = windows(step)
        loss = model(ids[:, :-1], ids[:, 1:], mean=True)
        loss.backward()
        if step == 0:
            for name, parameter in model.named_parameters():
                gradients[name] = parameter.grad.clone()
        most = config.optimizer.gradient_clipping
        norm = nn.utils.clip_grad_norm_(model.parameters(), most)
        optimizer.step()
        optimizer.zero_grad()
        numbers += [loss.item(), norm.item()]
    return numbers, gradients


def compare(grid: Grid, config: Config) -> dict[str, float]:
    from deepspeed.utils import safe_get_full_grad

    expected, gradients = alone(config)
    run = Trainer(config, model_of(config, None), grid)
    numbers, differences = [], {}
    engine_step = run.engine.step

    def step_after_comparing() -> None:
        """The engine's first step, before which its gradients are compared."""
        run.engine.step = engine_step
        for name, parameter in run.model.named_parameters():
            gradient = parameter.grad
            if config.parallel.zero_stage:
                gradient = safe_get_full_grad(parameter)
            differences[name] = gap(gradient, gradients[name])
        engine_step()

    run.engine.step = step_after_comparing
    for step in range(STEPS):
        result = run.train_step([windows(step)])
        numbers += [grid.mean(result.loss).item(), float(result.grad_norm)]
    for number, theirs in zip(numbers, expected, strict=True):
        differences["losses"] = max(differences.get("losses", 0), abs(number / theirs - 1))
    run.engine.destroy()
    return differences


def compare_engines(grid, results: dict) -> None:
    """Losses and norms of three steps at each ZeRO stage."""
    for name, kind, stage in ENGINES:
        words = [f"zero_optimization.stage={stage}", f"cp_comm_type={kind}"]
        results["engines"][f"{name}, {kind}, stage {stage}"] = steps(
            grid, [f"pos_emb={name}", "context_parallel_size=2", *words]
        )


def shared(name: str) -> bool:
    """Whether ranks can share the texts of an encoding."""
    try:
        load([], [*SHAPE, *of_encoding(name), "context_parallel_size=2"])
    except UserError:
        return False
    return True


def compare_stages(grid, results: dict, *, everything: bool) -> None:
    """Losses, norms and gradients of steps with clipping, beside torch alone.

    everything: every encoding with each exchange at each stage; else a few, each with one of them
    """
    names = [name for name in (sorted(REGISTRY) if everything else FEW) if shared(name)]
    for index, name in enumerate(names):
        several = list(itertools.product(("a2a", "all_gather"), range(4)))
        for kind, stage in several if everything else [several[index % 8]]:
            words = [f"zero_optimization.stage={stage}", f"cp_comm_type={kind}"]
            words += [*of_encoding(name), "context_parallel_size=2"]
            config = load([], [*TRAINED, *words])
            differences = compare(grid, config)
            results["stages"][f"{name}, {kind}, stage {stage}"] = differences


def steps(grid, words: list[str]) -> list[float]:
    """Loss, norm of the gradient before clipping, and the validation's loss after three steps."""
    config = load([], [*SHAPE, *ENGINE, *words])
    run = Trainer(config, model_of(config), grid)
    numbers = []
    for step in range(3):
        result = run.train_step([text(2, seed=step)])
        numbers += [grid.mean(result.loss).item(), float(result.grad_norm)]
    numbers.append(run.validate(iter([text(2, seed=9)]), 1))
    run.engine.destroy()
    return numbers


if __name__ == "__main__":
    grid = connect().sharing(2)
    torch.set_num_threads(1)
    refused = [name for name in sorted(REGISTRY) if not shared(name)]
    results: dict = {"refused": refused, "models": {}, "engines": {}, "stages": {}}
    everything = "stages" in sys.argv
    compare_stages(grid, results, everything=everything)
    if not everything:
        compare_models(grid, results)
        compare_engines(grid, results)
    if grid.first:
        Path(sys.argv[1]).write_text(json.dumps(results))
