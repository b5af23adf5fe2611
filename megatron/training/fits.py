"""Memory and disk that a training needs, held against what the machine has.

Per device, for P learned numbers, N ranks and e bytes of a number (4 in fp32, else 2):

    state         P without what other ranks of model_parallel_size have;
                  weights e P, gradients e P, Adam's averages 8 P, in bf16 and fp16 float32 masters
                  4 P; ZeRO 1 divides Adam and masters by N, 2 also gradients, 3 also weights
    activations   e tokens (layers * one + 4 hidden), one = 17 hidden for the papers' GPT, and 28
                  (measured) more where layers says gated_delta, 58 where it says kda; with
                  checkpoint_activations e tokens (layers * hidden + one + 4 hidden)
                  tokens: of a window, those of one rank of context_parallel_size; all_gather keeps
                  keys and values of the others, 2 hidden in each layer, too
    head          4 vocab hidden for the gradient of the output matrix, and three blocks of logits

The state is a lower bound. The rest is an estimate: the peaks of four small fp32 steps on the CPU
(292 to 760 MB estimated) were 1.2 to 1.6 times it, most with checkpoint_activations. So the state
and half of the rest are certain, and what is beyond the memory even so is refused.
"""

from typing import NamedTuple

import torch
from psutil import swap_memory

from megatron.config import Config
from megatron.errors import UserError
from megatron.model import Architecture
from megatron.model.head import tokens_at_once
from megatron.model.size import Parameters, parameters
from megatron.parallel.machine import device_memory, in_bytes
from megatron.positions.layers import ATTENTION, LATENT, layers_of_kinds
from megatron.training.trainer import shares_of

ADAM = 8  # bytes of a number: two float32 averages
FLOAT32 = 4
CHECKPOINT = 12  # bytes of a number in a checkpoint: float32 weights and Adam's two averages
SMALLEST_DEVICE = 2_000_000_000  # bytes; asking a CUDA device takes a second


class TrainingNeeds(NamedTuple):
    """Needs of a training. state, activations: bytes per device; disk: of checkpoints, at most."""

    parameters: Parameters
    state: int
    activations: int
    disk: int

    @property
    def memory(self) -> int:
        """Bytes per device."""
        return self.state + self.activations

    def __str__(self) -> str:
        memory, disk = in_bytes(self.memory), in_bytes(self.disk)
        return f"about {memory} of memory per device, {disk} of disk for checkpoints"


def needs(config: Config, vocab: int, ranks: int, device: torch.device) -> TrainingNeeds:
    """The needs of a training on so many ranks of such devices."""
    counts = parameters(config, vocab)
    training, parallel, stage = config.training, config.parallel, config.parallel.zero_stage
    number = FLOAT32 if config.precision.dtype == "fp32" else 2
    masters = 0 if config.precision.dtype == "fp32" else FLOAT32
    # Ranks that share layers have the embedding whole.
    shares = shares_of(config).ranks
    embedding = vocab * config.model.hidden_size
    share = embedding + (counts.whole - embedding) // shares
    ranks = max(1, ranks // shares)
    state = number * share // (ranks if stage == 3 else 1)
    state += number * share // (ranks if stage >= 2 else 1)
    state += (ADAM + masters) * share // (ranks if stage >= 1 else 1)

    # Numbers that backward needs, per token: 5 of the residual stream, 4 of the heads (queries,
    # keys, values and output), 2 of the MLP's width before and after the activation, 4 with a gate.
    model = Architecture.of(config.model)
    mlp = (4 if model.widened > model.mlp_width else 2) * model.mlp_width
    layer = 5 * model.hidden_size + (4 * model.attention_width + mlp) // shares
    _, heads, key_dim, value_dim = model.delta_sizes
    values, keys = heads * value_dim, heads * key_dim
    # Measured, beyond attention; kda has a decay for each pair of a chunk and feature of a key.
    more = {ATTENTION: 0, "gated_delta": 28 * values, "kda": 28 * values + 30 * keys}
    if parallel.context_parallel_size > 1:  # what becomes of a state before the own part
        more["gated_delta"] += 5 * keys
        more["kda"] += 12 * keys
    # Queries and keys, what the latent gives, outputs, and the latents before and after a norm.
    rank, encoded, plain, features = model.latent_sizes
    head_numbers = model.num_attention_heads * (3 * plain + 2 * encoded + 2 * features)
    latent_numbers = 2 * rank + 2 * (model.q_lora_rank or 0)
    more[LATENT] = head_numbers + latent_numbers - 4 * model.attention_width
    kinds = layers_of_kinds(model)
    if training.checkpoint_activations:
        layers = model.num_layers * model.hidden_size + layer
        layers += max(more[kind] for kind in kinds)
    else:
        layers = model.num_layers * layer
        layers += sum(more[kind] * count for kind, count in kinds.items())
    text = training.train_micro_batch_size_per_gpu * config.model.seq_length
    tokens = text // parallel.context_parallel_size
    activations = number * tokens * (layers + 4 * model.hidden_size)
    if parallel.cp_comm_type == "all_gather":  # keys and values of the other parts
        at_once = 1 if training.checkpoint_activations else model.num_layers
        activations += number * (text - tokens) * at_once * 2 * model.attention_width
    activations += FLOAT32 * vocab * model.hidden_size
    activations += 3 * FLOAT32 * min(tokens, tokens_at_once(device)) * vocab
    interval, most = config.checkpoint.save_interval, config.checkpoint.keep_last_n_checkpoints
    checkpoints = -(-training.train_iters // interval) if interval else 1
    if most:
        checkpoints = min(checkpoints, most)
    disk = CHECKPOINT * counts.whole * (checkpoints + 1)
    return TrainingNeeds(counts, state, activations, disk)


def check_fits(
    config: Config, vocab: int, *, ranks: int, local_ranks: int, device: torch.device
) -> TrainingNeeds:
    """The needs of a training; raises UserError if what is certain of them is beyond the memory.

    ranks: of the whole run; local_ranks: those on this machine, whose memory they share on the CPU
    """
    need = needs(config, vocab, ranks, device)
    sharing = local_ranks if device.type == "cpu" else 1
    needed = (need.state + need.activations // 2) * sharing
    if device.type == "cuda" and needed < SMALLEST_DEVICE:
        return need
    memory = device_memory(device)
    if device.type == "cpu":
        memory += swap_memory().total
    if needed > memory:
        model = config.model
        windows = config.training.train_micro_batch_size_per_gpu
        raise UserError(
            f"num_layers = {model.num_layers}, hidden_size = {model.hidden_size}, seq_length ="
            f" {model.seq_length}, train_micro_batch_size_per_gpu = {windows}:"
            f" {need.parameters.whole:,} parameters and what a step keeps need {in_bytes(needed)}"
            f" or more in {sharing} process(es), and there are {in_bytes(memory)} of memory - lower"
            " them, make_vocab_size_divisible_by or the encoding's options"
        )
    return need
