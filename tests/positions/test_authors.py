"""Encodings against numbers of their authors' code: scores, output and gradients.

GOLDEN_ENCODINGS names another folder of the format that tests/golden/README.md describes, with
other sizes. A file that is not there skips its test.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from megatron.conformance.subject import scores as scores_of
from megatron.errors import UserError
from megatron.positions import Position, Shape, build
from megatron.positions.precision import UNBOUNDED
from tests.positions.golden import Golden, load
from tests.support import fill


@dataclass
class Case:
    """How one variant of a file is built from ours.

    name, options: of our encoding; see authors.yml
    numbers: our parameter for each parameter and gradient of the file, by its name there
    constant: whether scores of a head may differ by a constant, which the softmax ignores
    last_score: whether the score of the last token with itself is theirs; if not, neither are its
        output and the gradients
    out: the name of the output that ours is
    train_length: length of the texts that it is built for
    x: numbers [batch, heads, length, head_dim] of the file that take the place of the layer's input
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    numbers: dict[str, str] = field(default_factory=dict)
    constant: bool = False
    last_score: bool = True
    x: str | None = None
    train_length: int = 512
    out: str = "out"

    def build(self, golden: Golden) -> Position:
        shape = golden.shape(self.train_length)
        position = build(self.name, shape, **golden.values(self.options))
        fill(position, golden.params(self.numbers))
        if self.x is not None:  # The file has the keys and not the map from x, so x is the keys.
            torch.nn.init.eye_(position.key_weight)
            torch.nn.init.zeros_(position.key_bias)
        return position


TABLE = yaml.safe_load(Path(__file__).with_name("authors.yml").read_text(encoding="utf-8"))
CASES = {
    name: {variant: Case(**case) for variant, case in variants.items()}
    for name, variants in TABLE.items()
}


def output_of(scores: Tensor, v: Tensor) -> Tensor:
    """The output of attention, by its definition: [batch, heads, length, head_dim]."""
    later = torch.ones_like(scores, dtype=torch.bool).triu(1)
    return scores.masked_fill(later, -torch.inf).softmax(-1) @ v


def inside_bounds(position: Position, name: str) -> Tensor:
    """Where a parameter is within its bounds. Outside, ours lets the gradient pass, theirs not."""
    *path, last = name.split(".")
    owner = position.get_submodule(".".join(path))
    low, high = owner.bounds.get(last, UNBOUNDED)
    parameter = owner.get_parameter(last)
    return (parameter >= low) & (parameter <= high)


def close(values: Tensor, expected: Tensor, tolerance: float) -> None:
    """Within the tolerance of the largest number that is expected, and of 1."""
    values = values.detach().double().reshape(expected.shape)
    largest = max(1.0, expected.abs().max().item())
    torch.testing.assert_close(values, expected.double(), rtol=0, atol=tolerance * largest)


def merged(heads: Tensor) -> Tensor:
    """[batch, heads, length, head_dim] -> [batch, length, hidden]"""
    return heads.transpose(1, 2).flatten(2)


def lower_triangle(scores: Tensor) -> Tensor:
    rows, columns = torch.tril_indices(*scores.shape[-2:])
    return scores[..., rows, columns]


ALL = [(name, variant) for name, variants in CASES.items() for variant in variants]


@pytest.mark.parametrize(("name", "variant"), ALL, ids=str)
def test_an_encoding_gives_the_numbers_of_its_authors(name, variant):
    golden, case = load(name, variant), CASES[name][variant]
    assert golden.lengths
    for length in golden.lengths:
        expected = golden.of_length(length)
        position = case.build(golden).double()
        position.prepare(int(length[1:]))
        q, k, v, x, dout = (
            golden.inputs[f"{length}.{key}"].double() for key in ("q", "k", "v", "x", "dout")
        )
        x_name = "grad_x"
        if case.x is not None:
            x_name = f"grad_{case.x}"
            x = merged(expected[case.x].double())
            expected[x_name] = merged(expected[x_name])
        inputs = {"grad_q": q, "grad_k": k, "grad_v": v, x_name: x}
        for tensor in inputs.values():
            tensor.requires_grad_()
        scores = scores_of(position, q, k, x)
        bias = lower_triangle(scores - q @ k.mT / q.shape[-1] ** 0.5)
        out = output_of(scores, v)
        check_values(lower_triangle(scores), bias, out, expected, case)
        if case.last_score:
            (out * dout).sum().backward()
            check_gradients(position, inputs, expected, case)


def check_values(
    scores: Tensor, bias: Tensor, out: Tensor, expected: dict[str, Tensor], case: Case
) -> None:
    if "scores" in expected:
        theirs = expected["scores"]
        ours = scores[: len(theirs)]
        if case.constant:
            ours, theirs = ours - ours[..., :1], theirs - theirs[..., :1]
        last = theirs.shape[-1] if case.last_score else -1
        close(ours[..., :last], theirs[..., :last], 2e-5)
    if "bias" in expected:
        close(bias[: len(expected["bias"])], expected["bias"], 2e-5)
    if case.out in expected:
        last = out.shape[2] if case.last_score else -1
        close(out[:, :, :last], expected[case.out][:, :, :last], 2e-5)


def check_gradients(
    position: Position, inputs: dict[str, Tensor], expected: dict[str, Tensor], case: Case
) -> None:
    for name, tensor in inputs.items():
        if name in expected:
            assert tensor.grad is not None
            close(tensor.grad, expected[name], 1e-4)
    for theirs, ours in case.numbers.items():
        gradient = expected.get(f"grad.{theirs}", expected.get(f"grad_{theirs}"))
        if gradient is not None:
            inside = inside_bounds(position, ours).view(gradient.shape)
            our_gradient = position.get_parameter(ours).grad.view(gradient.shape)
            close(our_gradient[inside], gradient[inside], 1e-4)


@pytest.mark.parametrize("variant", ["llama3", "small"])
def test_clipped_rope_has_the_frequencies_of_the_authors(variant):
    golden = load("clipped_rope", variant)
    shape = Shape(1, int(golden.param("head_dim")), 16, 512)
    base, clipped = golden.param("rope_theta"), int(golden.param("clip_low_n"))
    trained = build("rotary", shape, base=base)
    trained.use_scaling({"name": "clipped_rope", "clipped": clipped})
    for ours in (trained, build("clipped_rope", shape, base=base, clipped=clipped)):
        torch.testing.assert_close(ours.inv_freq, golden.numbers["inv_freq"], rtol=1e-6, atol=1e-25)


@pytest.mark.parametrize("variant", CASES["fope"])
def test_fope_begins_with_the_frequencies_and_mixtures_of_the_authors(variant):
    golden = load("fope", variant)
    options = {**golden.values(CASES["fope"][variant].options), "learned": False}
    almost_fixed, drawn = (build("fope", golden.shape(64), **options, gain=g) for g in (1e-9, 0.3))
    close(drawn.frequencies, golden.numbers["inv_freq"], 1e-7)
    for theirs, ours in CASES["fope"][variant].numbers.items():
        close(almost_fixed.bounded(ours), golden.numbers[f"init_eye.{theirs}"], 1e-7)
        assert not torch.equal(drawn.bounded(ours), almost_fixed.bounded(ours))


@pytest.mark.parametrize(("head_dim", "train_length"), [(64, 512), (64, 2048), (128, 8192)])
def test_fopes_first_mixtures_are_the_authors_at_any_length(head_dim, train_length):
    """get_step_eye of olmo/model.py at bd94b20: a 1 every ceil(inputs / outputs) inputs."""
    position = build("fope", Shape(2, head_dim, 128, train_length), gain=1e-9)
    inputs, outputs = position.cosines.shape[1:]
    expected = torch.zeros(inputs, outputs)
    step = math.ceil(inputs / outputs)
    for column in range(outputs):
        if column * step < inputs:
            expected[column * step, column] = 1.0
    torch.testing.assert_close(position.cosines[0], expected, rtol=0, atol=1e-6)


def test_fope_draws_as_xavier_does_over_pairs_and_heads():
    position = build("fope", Shape(8, 64, 512, 512), gain=0.6)
    noise = torch.cat([position.cosines, position.sines]) - torch.eye(16)
    assert noise.std().item() == pytest.approx(0.6 * (2 / (16 * 16 + 8 * 16)) ** 0.5, rel=0.03)
    with pytest.raises(UserError, match="seq_length: 6 and head_dim = 64 let no pair turn - give"):
        build("fope", Shape(8, 64, 512, 6))


@pytest.mark.parametrize("variant", ["ld", "ap"])
def test_comrope_on_one_axis_is_grape_m_after_a_change_of_basis(variant):
    """Its matrix of a block is Q T Qᵀ with turns by λ in T, and Q is one for queries and keys."""
    golden = load("comrope", variant)
    theirs = golden.numbers["param.freqs"].double()[:, 0]  # [heads, blocks, size, size]
    generator = theirs - theirs.mT
    if "param.multiplier" in golden.numbers:
        generator = generator * golden.numbers["param.multiplier"].double()[0, 0]
    values, vectors = torch.linalg.eigh(1j * generator)
    size = generator.shape[-1]
    frequencies, turned = values[..., size // 2 :], vectors[..., size // 2 :] * 2**0.5
    ours = build("grape_m", golden.shape(), by_head=True).double()
    fill(ours, {"log_frequencies": 16 * frequencies.log()})

    def in_basis(x: Tensor) -> Tensor:
        blocks = x.unflatten(-1, (-1, size)).transpose(2, 3)  # [batch, heads, blocks, length, size]
        halves = [blocks @ turned.imag, blocks @ turned.real]
        return torch.cat([half.transpose(2, 3).flatten(3) for half in halves], dim=-1)

    for length in golden.lengths:
        q, k, x = (golden.inputs[f"{length}.{key}"].double() for key in ("q", "k", "x"))
        theirs = golden.of_length(length)["scores"]
        scores = lower_triangle(scores_of(ours, in_basis(q), in_basis(k), x))
        close(scores[: len(theirs)], theirs, 2e-5)
