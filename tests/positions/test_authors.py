"""Encodings against numbers of their authors' code: scores, output and gradients.

GOLDEN_ENCODINGS names another folder of the format that tests/golden/README.md describes, with
other sizes. A file that is not there skips its test.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.attention import attention
from megatron.attention.terms import Content
from megatron.errors import UserError
from megatron.positions import Position, Shape, build
from megatron.positions.precision import UNBOUNDED
from tests.positions.golden import Golden, load
from tests.support import fill


@dataclass
class Case:
    """How one variant of a file is built from ours.

    name, options: of our encoding, the options by the numbers of the file
    numbers: our parameter for each parameter and gradient of the file, by its name there
    constant: whether scores of a head may differ by a constant, which the softmax ignores
    last_score: whether the score of the last token with itself is theirs; if not, neither are its
        output and the gradients
    out: the name of the output that ours is
    train_length: length of the texts that it is built for
    x: numbers [batch, heads, length, head_dim] of the file that take the place of the layer's input
    """

    name: str
    options: Callable[[Golden], dict[str, Any]] = lambda golden: {}
    numbers: dict[str, str] = field(default_factory=dict)
    constant: bool = False
    last_score: bool = True
    x: str | None = None
    train_length: int = 512
    out: str = "out"

    def build(self, golden: Golden) -> Position:
        position = build(self.name, golden.shape(self.train_length), **self.options(golden))
        fill(position, golden.params(self.numbers))
        if self.x is not None:  # The file has the keys and not the map from x, so x is the keys.
            torch.nn.init.eye_(position.key_weight)
            torch.nn.init.zeros_(position.key_bias)
        return position


def yarn(golden: Golden) -> dict[str, Any]:
    return {
        "scaling": "yarn",
        "base": golden.param("base"),
        "factor": golden.param("scale"),
        "original_length": int(golden.param("orig")),
        "beta_fast": golden.param("fast"),
        "beta_slow": golden.param("slow"),
    }


def resonance(golden: Golden) -> dict[str, Any]:
    options = {"base": golden.param("base"), "resonance": True, "interleaved": True}
    if golden.variant == "resonance":
        return options
    options |= {"factor": golden.param("scale"), "original_length": int(golden.param("maxp"))}
    if golden.variant == "resonance_ntk":
        return {**options, "scaling": "ntk"}
    turns = {"beta_fast": golden.param("fast"), "beta_slow": golden.param("slow")}
    return {**options, **turns, "scaling": "yarn"}


def longrope(golden: Golden) -> dict[str, Any]:
    """Theirs takes one list at every length; ours takes short_factor up to original_length."""
    options: dict[str, Any] = {"scaling": "longrope", "base": golden.param("base")}
    options |= dict.fromkeys(("long_factor", "short_factor"), golden.list("factors"))
    options["original_length"] = int(golden.param("orig"))
    options["factor"] = golden.param("maxp") / golden.param("orig")
    if golden.variant == "ms_yarn_magnitude":
        options["attention_factor"] = golden.numbers["mscale"].item()
    return options


def fire(golden: Golden) -> dict[str, Any]:
    width = golden.numbers["param.mlp.0.bias"].numel()
    return {"mlp_layers": [width], "threshold": golden.param("init_L")}


def selective_rope(golden: Golden) -> dict[str, Any]:
    theta = golden.numbers["param.temperature"].flatten()  # θ_c = base^(-2c / head_dim)
    ours = golden.params(OF_SELECTIVE)
    low_rank = "down" in ours
    return {
        "base": theta[1].double().item() ** (-golden.shape().head_dim / 2),
        "rank": len(ours["down"]) if low_rank else None,
        "taps": ours["filter"].shape[-1] if low_rank else None,
        "drift": "log_drift" in ours,
        "gate": "gate_weight" in ours,
    }


def cope(golden: Golden) -> dict[str, Any]:
    count = golden.numbers["param.pos_emb"].shape[2]
    scaled = golden.variant in ("ram", "ram_sepkey")
    return {"positions": count, "scaled": scaled, "separate_keys": golden.variant == "ram_sepkey"}


def dape(golden: Golden) -> dict[str, Any]:
    """The variants are `alibi_v1` and so on: what gives the bias, and the version."""
    inner = golden.variant.split("_")[0]
    args = {}
    if inner == "fire":
        args = {**fire(golden), "activation": "leaky_relu", "last_bias": True}
    name = {"nope": "none", "kerple": "kerple_log"}.get(inner, inner)
    return {"of": name, "args": args, "width": golden.numbers["param.mlp2.0.bias"].numel()}


def grape_m(golden: Golden) -> dict[str, Any]:
    by_head = golden.numbers["param.log_freq"].dim() == 2
    return {"by_content": golden.variant == "ctx", "by_head": by_head}


def fope(golden: Golden) -> dict[str, Any]:
    """The parameters are fourier_coef alone where they are one matrix for all."""
    dim = int(golden.param("fourier_dim"))
    return {
        "dim": dim or None,
        "keep_slow": golden.variant == "keep_zero",
        "shared": golden.variant == "one_matrix",
        "learned": True,
    }


def grape_ap(golden: Golden) -> dict[str, Any]:
    return {"features": len(golden.numbers["param.c_p"]) // golden.shape().heads}


OF_FOPE = {"cos_coef": "cosines", "sin_coef": "sines"}
OF_GRAPE_A = {"omega": "omega", "u": "key_direction", "v": "query_direction"}
OF_GRAPE_M = {"log_freq": "log_frequencies", "omega_weight": "weight", "omega_bias": "bias"}
OF_FIRE = {
    "c": "c",
    "L_multiplier": "length_multiplier",
    "mlp.0.weight": "weight_0",
    "mlp.0.bias": "bias_0",
    "mlp.2.weight": "weight_1",
}
OF_DAPE = {
    "mlp2.0.weight": "weight_0",
    "mlp2.0.bias": "bias_0",
    "mlp2.2.weight": "weight_1",
    "mlp2.2.bias": "bias_1",
}
OF_INNER = {
    "alibi": {},
    "nope": {},
    "kerple": {"bias_p": "inner.p", "bias_a": "inner.a"},
    "fire": {
        **{theirs: f"inner.{ours}" for theirs, ours in OF_FIRE.items()},
        "mlp.2.bias": "inner.bias_1",
    },
}
OF_SELECTIVE = {
    "phi_proj.0.weight": "down",
    "phi_proj.1.weight": "up",
    "phi_proj.weight": "directions",
    "phi_proj.scalar": "lengths",
    "phi_conv1d.weight": "filter",
    "phi_bias": "log_drift",
    "phase_gate_proj.weight": "gate_weight",
    "phase_gate_proj.bias": "gate_bias",
}

P_ROPE = Case("rotary", lambda golden: {"fraction": float(golden.variant[1:])})
LONGROPE, RESONANCE = Case("rotary", longrope), Case("rotary", resonance)
SELECTIVE = Case("selective_rope", selective_rope, OF_SELECTIVE)
CAROPE = Case(
    "carope", lambda golden: {"from_one": golden.variant == "from_1"}, {"weight": "weight"}
)
FOPE = Case("fope", fope, OF_FOPE, train_length=64)
GRAPE_A = Case("grape_a", lambda golden: {"gates": golden.variant}, OF_GRAPE_A)
GRAPE_AP = Case("grape_ap", grape_ap, {"c_p": "weight"})
GRAPE_M = Case("grape_m", grape_m, OF_GRAPE_M)
COPE = Case("cope", cope, {"pos_emb": "vectors"})
CASES: dict[str, dict[str, Case]] = {
    "p_rope": {"p0.25": P_ROPE, "p0.75": P_ROPE},
    "yarn": {"": Case("rotary", yarn)},
    "resonance_rope": dict.fromkeys(("resonance", "resonance_ntk", "resonance_yarn"), RESONANCE),
    "longrope": {"ms": LONGROPE, "ms_yarn_magnitude": LONGROPE},
    "fire": {"fire": Case("fire", fire, OF_FIRE, constant=True)},
    "fox": {"": Case("fox", numbers={"gate_weight": "weight", "gate_bias": "bias"})},
    "selective_rope": dict.fromkeys(("default", "full_rank", "gate_bias"), SELECTIVE),
    "grape_a": dict.fromkeys(("query_key", "query", "key"), GRAPE_A),
    "grape_ap": {"": GRAPE_AP},
    "grape_m": {"nonctx": GRAPE_M, "ctx": GRAPE_M},
    "stickbreaking": {
        variant: Case(
            "stick_breaking",
            lambda golden: {"attend_current": golden.variant != "strict"},
            out="out_with_remainder",
        )
        for variant in ("strict", "attend_current")
    },
    "fope": {
        **dict.fromkeys(("default", "wide", "keep_zero"), FOPE),
        "one_matrix": replace(FOPE, numbers={"fourier_coef": "cosines"}),
    },
    "carope": dict.fromkeys(("from_0", "from_1"), CAROPE),
    "pope": {"": Case("pope", numbers={"bias": "delta"})},
    "cope": {
        **dict.fromkeys(("ram", "ram_nodiv", "dape"), COPE),
        "ram_sepkey": replace(COPE, x="key_cope"),
    },
    "dape_v1": {
        f"{inner}_v1": Case("dape", dape, OF_DAPE | numbers) for inner, numbers in OF_INNER.items()
    },
    "dape_v2": {
        f"{inner}_v2": Case("dape_v2", dape, OF_DAPE | OF_INNER[inner], last_score=False)
        for inner in ("alibi", "fire", "kerple")
    },
}


def scores_of(position: Position, q: Tensor, k: Tensor, x: Tensor) -> Tensor:
    """What enters the softmax, before the mask: [batch, heads, length, length]."""
    length = q.shape[2]
    q, k = position.on_queries_keys(q, k)
    q, k = position.on_queries_keys_by_content(q, k, x, {})
    scores = q @ k.mT / q.shape[-1] ** 0.5
    weight, bias = position.distance_weight(length), position.distance_bias(length)
    index = torch.arange(length)
    distance = (index[:, None] - index).clamp(min=0)
    if weight is not None:
        scores = scores * weight[:, distance]
    if bias is not None:
        scores = scores + bias[:, distance]
    if position.has("index_bias"):
        scores = scores + position.index_bias(index, index)
    if position.has("score_bias"):
        scores = scores + Content.of(position.score_bias(x, {}), length).bias()
    if position.has("on_scores"):
        scores = position.on_scores(scores, x, {})
    return scores


def output_of(position: Position, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
    """The output of attention, by its definition: [batch, heads, length, head_dim]."""
    length = q.shape[2]
    q, k = position.on_queries_keys(q, k)
    q, k = position.on_queries_keys_by_content(q, k, x, {})
    scale = position.score_scale(torch.arange(1, length + 1))
    q = q if scale is None else q * scale[..., None]
    on_scores = None
    if position.has("on_scores"):
        on_scores = partial(position.on_scores, x=x, memory={})
    return attention(
        q,
        k,
        v,
        position.distance_bias(length),
        weight=position.distance_weight(length),
        index_bias=position.index_bias if position.has("index_bias") else None,
        on_scores=on_scores,
        score_bias=position.score_bias(x, {}) if position.has("score_bias") else None,
        backend="eager",
    )


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


@pytest.mark.parametrize(("name", "variant"), ALL, ids=lambda text: text or "only")
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
        with torch.no_grad():
            scores = scores_of(position, q, k, x)
            bias = lower_triangle(scores - q @ k.mT / q.shape[-1] ** 0.5)
            scores = lower_triangle(scores)
        out = output_of(position, q, k, v, x)
        check_values(scores, bias, out, expected, case)
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


@pytest.mark.parametrize("name", ["yarn", "longrope"])
def test_a_model_trained_without_scaling_gets_the_frequencies_of_the_authors(name):
    for variant, case in CASES[name].items():
        golden = load(name, variant)
        scaled = case.build(golden)
        trained = build("rotary", golden.shape(), base=scaled.base)
        trained.use_scaling({"name": name, **scaled.options})
        expected = golden.numbers.get("inv_freq", golden.numbers.get("L48.inv_freq"))
        torch.testing.assert_close(trained.inv_freq, expected, rtol=1e-6, atol=0)
        assert trained.amplitude == pytest.approx(golden.numbers["mscale"].item())


@pytest.mark.parametrize("variant", CASES["fope"])
def test_fope_begins_with_the_frequencies_and_mixtures_of_the_authors(variant):
    golden = load("fope", variant)
    options = {**fope(golden), "learned": False}
    almost_fixed, drawn = (build("fope", golden.shape(64), **options, gain=g) for g in (1e-9, 0.3))
    close(drawn.frequencies, golden.numbers["inv_freq"], 1e-7)
    for theirs, ours in CASES["fope"][variant].numbers.items():
        close(almost_fixed.bounded(ours), golden.numbers[f"init_eye.{theirs}"], 1e-7)
        assert not torch.equal(drawn.bounded(ours), almost_fixed.bounded(ours))


def test_fope_draws_as_xavier_does_over_pairs_and_heads():
    table = load("fope", "table.dim64_max512").numbers
    position = build("fope", Shape(8, 64, 512, 512), gain=0.6)
    close(position.frequencies, table["inv_freq"], 1e-7)
    assert list(position.cosines.shape) == table["coef_shape"].tolist()
    noise = torch.cat([position.cosines, position.sines]) - torch.eye(16)
    assert noise.std().item() == pytest.approx(0.6 * (2 / (16 * 16 + 8 * 16)) ** 0.5, rel=0.03)
    same = build("fope", Shape(8, 64, 512, 512), gain=0.6)
    assert torch.equal(same.cosines, position.cosines)
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
