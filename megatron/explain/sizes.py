"""Parameters, tokens, operations, memory and time of one run, by the project's own formulas."""

from dataclasses import dataclass
from functools import cached_property

import torch

from megatron.config import Config
from megatron.data.parts import open_parts
from megatron.errors import UserError
from megatron.evaluation.memory import evaluation_memory
from megatron.model import Architecture, position_of_entry
from megatron.model.size import BACKWARD, Parameters, parameters
from megatron.positions.layers import entries_of
from megatron.positions.outline import Outline
from megatron.sweeps.cost import evaluation_flops, forward_flops
from megatron.training.epochs import with_epochs
from megatron.training.fits import Needs, needs, windows_per_step
from megatron.training.vocabulary import VOCAB, likely_rows

HOUR = 3600
EVALUATED_IN = "fp32"  # evaluate.py's default


@dataclass(frozen=True)
class Sizes:
    """Of one run.

    config: with the train_iters that train_epochs means, where the data are at hand
    devices: how many train together
    device: what kind they are, cuda or cpu; blocks of logits are larger on CUDA
    fault: why the data cannot be opened; None where they can, or none are named
    """

    config: Config
    devices: int
    device: torch.device
    fault: str | None

    @classmethod
    def of(cls, config: Config, devices: int | None = None, device: str = "cuda") -> "Sizes":
        """devices: None for what train_batch_size or num_gpus asks for.

        UserError where so many devices do not make train_batch_size.
        """
        count = devices_of(config) if devices is None else devices
        config.check_batch(count)
        fault = None
        if config.data.data_path or config.data.train_data_paths:
            try:
                part = open_parts(config.data, ["train"])["train"]
                config = with_epochs(config, part, count)
            except UserError as absent:
                fault = str(absent)
        return cls(config, count, torch.device(device), fault)

    @cached_property
    def vocab(self) -> int:
        """Rows of the embedding."""
        return likely_rows(self.config)

    @property
    def vocab_basis(self) -> str:
        """Where the vocabulary comes from, in words."""
        has_data = self.config.data.data_path or self.config.data.train_data_paths
        if has_data and self.fault is None:
            return "by the data"
        return f"GPT-2's {VOCAB}, as no data are at hand"

    @cached_property
    def parameters(self) -> Parameters:
        """Learned numbers."""
        return parameters(self.config, self.vocab)

    @property
    def steps(self) -> int | None:
        """Optimizer steps; None where they follow from data that are not at hand."""
        training = self.config.training
        if training.train_epochs is not None and not training.train_iters:
            return None
        return training.train_iters

    @property
    def windows_per_step(self) -> int:
        """Windows of all devices."""
        return windows_per_step(self.config) * self.devices

    @property
    def tokens(self) -> int | None:
        """Tokens that the training reads."""
        if self.steps is None:
            return None
        return self.steps * self.windows_per_step * self.config.model.seq_length

    @cached_property
    def flops_per_token(self) -> float:
        """Operations of one trained token, forward and backward."""
        length = self.config.model.seq_length
        return BACKWARD * forward_flops(self.config, self.vocab, length)

    @property
    def training_flops(self) -> float | None:
        """Operations of the training."""
        return None if self.tokens is None else self.tokens * self.flops_per_token

    @cached_property
    def evaluation_flops(self) -> float:
        """Operations of one evaluation with evaluate.py's defaults."""
        return evaluation_flops({}, self.config, self.vocab)

    @cached_property
    def needs(self) -> Needs:
        """Memory and disk of the training."""
        return needs(self.config, self.vocab, self.devices, self.device)

    @cached_property
    def evaluation_memory(self) -> dict[int, int]:
        """Bytes of one device by the length of the window, in float32."""
        by_length = {}
        for length in sorted(self.config.evaluation.eval_lengths):
            by_length[length] = evaluation_memory(
                Architecture.of(self.config.model),
                self.vocab,
                self.parameters.whole,
                length,
                batch_tokens=self.config.evaluation.eval_batch_tokens,
                device=self.device,
                dense=self.dense,
            )
        return by_length

    @cached_property
    def dense(self) -> bool:
        """Whether any layer's encoding needs all scores of a batch at once."""
        config = self.config
        with torch.random.fork_rng(devices=[]), Outline():
            positions = [position_of_entry(config, entry) for entry in entries_of(config.position)]
        return any(position.has("on_scores") for position in positions)

    @property
    def scores(self) -> int:
        """Bytes that a training keeps at least of dense scores: a float32 copy in each layer."""
        if not self.dense:
            return 0
        model, training = self.config.model, self.config.training
        layers = 1 if training.checkpoint_activations else model.num_layers
        windows = training.train_micro_batch_size_per_gpu
        return 4 * layers * windows * model.num_attention_heads * model.seq_length**2


def devices_of(config: Config) -> int:
    """Devices that a configuration asks for: by train_batch_size, else by num_gpus, else one."""
    whole, of_one = config.training.train_batch_size, windows_per_step(config)
    if whole is not None and whole % of_one == 0:
        return whole // of_one
    return (config.launch.num_gpus or 1) * (config.launch.num_nodes or 1)


def device_hours(operations: float, flops_per_second: float, utilisation: float) -> float:
    """Hours of one device that reaches that share of its speed; several share them."""
    return operations / (flops_per_second * utilisation) / HOUR
