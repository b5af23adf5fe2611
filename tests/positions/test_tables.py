"""KERPLE, MEP's language, Sandwich and BAM against the papers' formulas in float64."""

import math

import pytest
import torch

from megatron.positions import Position, Shape, build
from megatron.positions.alibi import slopes

SHAPE = Shape(heads=12, head_dim=64, hidden=768, train_length=512)
LONG = 131072
S = torch.tensor(
    [2.0**-n for n in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5], dtype=torch.float64
)[:, None]
TANH_S = [
    0.25737,
    0.12873,
    0.06437,
    0.03219,
    0.0163,
    0.00849,
    0.00457,
    0.00256,
    0.36406,
    0.18203,
    0.09103,
    0.04552,
]
OLD_GAUSSIAN_S = [
    0.01064,
    0.00269,
    0.00068,
    0.00017,
    6e-05,
    3e-05,
    2e-05,
    1e-05,
    0.02143,
    0.00536,
    0.00135,
    0.00034,
]
HALF = {"exp": 0.5}
LOG3, WHT1, WHT2 = "kerple_log_3para", "kerple_wht_1para", "kerple_wht_2para"
# Every encoding of these families, and every option that makes a number learned.
FAMILY = {
    **{
        name: (name, {})
        for name in ("alibi", "gaussian", "tanh", "sandwich", "bam", "kerple_log", "kerple_power")
    },
    **{
        name: (name, {})
        for name in (LOG3, WHT1, WHT2, "kerple_bias_wht", "kerple_bias_2para", "kerple_bias_3para")
    },
    **{name: (name, {}) for name in ("mep_free", "mep_param", "mep_param_t5")},
    **{
        f"learned {name}": (name, {"learned_slopes": True})
        for name in ("alibi", "gaussian", "tanh")
    },
    "learned weights": ("mep", {"kernels": ["exp", "gaussian", "tanh"], "weights": "learned"}),
    "shared weights": (
        "mep",
        {"kernels": ["t5", "kerple_log", "sandwich"], "weights": "learned_shared"},
    ),
    "all learned": (
        "mep",
        {"kernels": [{"exp": {"learned_slopes": True}}, "bam"], "weights": "learned"},
    ),
}
every_one = pytest.mark.parametrize(("name", "options"), FAMILY.values(), ids=list(FAMILY))


def d(length: int = LONG) -> torch.Tensor:
    return torch.arange(length, dtype=torch.float64)


def number(position: Position, name: str, high: float = math.inf) -> torch.Tensor:
    return position.get_parameter(name).detach().double().clamp(0.01, high)[:, None]


def column(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


def tables(position: Position, length: int) -> list[torch.Tensor]:
    return [
        table
        for table in (position.distance_bias(length), position.distance_weight(length))
        if table is not None
    ]


def assert_bias(
    position: Position, expected: torch.Tensor, rtol: float = 3e-6, atol: float = 1e-6
) -> None:
    found = position.distance_bias(expected.shape[1])
    torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=atol)


def mean(*kernels: torch.Tensor) -> torch.Tensor:
    """log of the mean kernel, from log kernels, each [heads, length] float64."""
    return torch.stack(kernels).logsumexp(dim=0) - math.log(len(kernels))


def tanh(s: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
    return torch.log(1e-6 + 1 + torch.tanh(-s * distance))


def kerple(position: Position, kernel: int, distance: torch.Tensor) -> torch.Tensor:
    p, a = (number(position, f"kernels.{kernel}.{name}") for name in "pa")
    return -p * torch.log(1 + a * distance)


# KERPLE


def test_kerple_log_with_three_parameters():
    position = build(LOG3, SHAPE)
    assert_bias(
        position,
        -number(position, "r1")
        * torch.log(1 + number(position, "r2") * d() ** number(position, "r3", 2)),
    )
    two = build("kerple_log", SHAPE, p=0.7, a=0.3)
    torch.testing.assert_close(
        build(LOG3, SHAPE, r1=0.7, r2=0.3, r3=1).distance_bias(LONG),
        two.distance_bias(LONG),
        rtol=0,
        atol=0,
    )


@pytest.mark.parametrize("name", [WHT1, WHT2])
def test_kerple_weights_multiply_and_add_nothing(name):
    position = build(name, SHAPE)
    exponent = number(position, "weight_p", 2) if name == WHT2 else 2
    expected = torch.exp(-number(position, "weight_a") * d() ** exponent)
    # exp turns an absolute error of the exponent, 1e-6 of up to 90, into a relative one
    torch.testing.assert_close(
        position.distance_weight(LONG).double(), expected, rtol=2e-4, atol=1e-6
    )
    assert position.distance_bias(5) is None


@pytest.mark.parametrize("name", ["kerple_bias_2para", "kerple_bias_3para"])
def test_kerple_bumps_are_positive(name):
    position = build(name, SHAPE)
    exponent = number(position, "r3", 2) if name.endswith("3para") else 2
    expected = number(position, "r1") * torch.exp(-number(position, "r2") * d() ** exponent)
    assert_bias(position, expected, rtol=2e-4)
    assert (position.distance_bias(LONG) >= 0).all()


@pytest.mark.parametrize(
    ("name", "twos"),
    [
        (LOG3, {"r1", "r3"}),
        (WHT1, set()),
        (WHT2, {"weight_p"}),
        ("kerple_bias_2para", set()),
        ("kerple_bias_3para", {"r3"}),
        ("kerple_bias_wht", {"p", "weight_p"}),
    ],
)
def test_kerple_numbers_start_uniform(name, twos):
    for key, value in build(name, Shape(4096, 64, 768, 512)).named_parameters():
        high = 2 if key in twos else 1
        assert 0 <= value.min() < 0.01 * high, key
        assert 0.99 * high < value.max() <= high, key
        assert value.mean().item() == pytest.approx(high / 2, rel=0.05), key


def test_kerple_numbers_act_within_their_bounds():
    for name in (
        "kerple_log",
        LOG3,
        "kerple_power",
        "kerple_bias_wht",
        WHT1,
        WHT2,
        "kerple_bias_2para",
    ):
        position = build(name, SHAPE)
        with torch.no_grad():
            for value in position.parameters():
                value.fill_(-1.0)
        assert all((value == torch.tensor(0.01)).all() for value in position.learned().values())
    position = build("kerple_power", SHAPE)
    with torch.no_grad():
        position.a.fill_(0.1)
        position.p.fill_(5.0)
    assert_bias(position, (-0.1 * d() ** 2).expand(12, -1))


def test_kerple_power_with_exponent_one_is_alibi_without_any_learning():
    position = build("kerple_power", SHAPE, p=1, a=S[:, 0].tolist())  # fixed numbers know no floor
    assert list(position.parameters()) == []
    torch.testing.assert_close(
        position.distance_bias(LONG), build("alibi", SHAPE).distance_bias(LONG)
    )


def test_a_number_of_kerple_can_be_fixed_and_the_others_learned():
    position = build("kerple_log", SHAPE, p=2.2)
    assert list(position.learned()) == ["a"]
    assert_bias(position, -2.2 * torch.log(1 + number(position, "a") * d()))
    weight = build("kerple_bias_wht", SHAPE, weight_a=0.001, weight_p=2, p=0.5)
    assert list(weight.learned()) == ["a"]
    expected = torch.exp(-0.001 * d(200) ** 2).expand(12, -1)
    torch.testing.assert_close(weight.distance_weight(200).double(), expected, rtol=1e-5, atol=1e-6)


# MEP's kernels


def test_slopes_are_alibis_or_given_or_learned_from_there():
    assert_bias(build("gaussian", SHAPE, slopes=OLD_GAUSSIAN_S), -column(OLD_GAUSSIAN_S) * d() ** 2)
    assert_bias(build("alibi", SHAPE, slopes=0.25, slope_factor=0.5), (-0.125 * d()).expand(12, -1))
    learned = build("alibi", SHAPE, slope_factor=0.5, learned_slopes=True)
    assert_bias(learned, -S / 2 * d())
    with torch.no_grad():
        learned.slopes.fill_(-3.0)
    assert_bias(learned, (-1e-6 * d()).expand(12, -1))
    assert torch.equal(learned.learned()["slopes"], torch.full((12,), 1e-6))


def test_tanh_on_the_published_slopes_keeps_its_digits_far_out():
    position = build("tanh", SHAPE)
    expected = tanh(column(TANH_S), d())
    assert_bias(position, expected, rtol=1e-6, atol=2e-7)
    assert position.distance_bias(LONG)[0, -1].item() == pytest.approx(math.log(1e-6))


@pytest.mark.parametrize("heads", [1, 8, 16])
def test_tanh_of_other_head_counts_takes_alibis_slopes_in_the_published_ratio(heads):
    position = build("tanh", Shape(heads, 64, 64 * heads, 512))
    assert_bias(position, tanh(0.5148 * column(slopes(heads)), d(4096)), rtol=1e-6, atol=2e-7)
    published, alibi = torch.tensor(TANH_S, dtype=torch.float64), S[:, 0]
    steep = alibi > 0.04  # the docstring's ratio is that of the steeper ones
    torch.testing.assert_close(
        published[steep] / alibi[steep], torch.full((8,), 0.5148).double(), rtol=1e-3, atol=0
    )
    assert 0.52 < (published / alibi)[~steep].min() < (published / alibi)[~steep].max() < 0.656


def test_tanh_on_half_slopes_is_the_sigmoid_kernel_up_to_a_constant():
    position = build("tanh", SHAPE, slopes=S[:, 0].tolist(), slope_factor=0.5)
    sigmoid = torch.log(torch.sigmoid(-S * d()) + 0.5e-6)
    assert_bias(position, sigmoid + math.log(2), rtol=1e-6, atol=3e-7)


# MEP's mixtures: names of its published configuration files, and what their tokens say


@pytest.mark.parametrize(
    ("name", "kernels", "weights", "expected"),
    [
        ("ali", ["exp"], "equal", lambda d: -S * d),
        ("ali05", [HALF], "equal", lambda d: -S * d / 2),
        ("ali_ali05", ["exp", HALF], "equal", lambda d: mean(-S * d, -S * d / 2)),
        (
            "ali05_gaussian_all002",
            [HALF, "gaussian"],
            [0.5, 0.5],
            lambda d: mean(-S * d / 2, -S * d**2),
        ),
        (
            "ali_ali05_gaussian_all003",
            ["exp", HALF, "gaussian"],
            [1 / 3, 1 / 3, 1 / 3],
            lambda d: mean(-S * d, -S * d / 2, -S * d**2),
        ),
        (
            "ali_ali05_tanh_all003",
            ["exp", HALF, "tanh"],
            [1 / 3, 1 / 3, 1 / 3],
            lambda d: mean(-S * d, -S * d / 2, tanh(column(TANH_S), d)),
        ),
        (
            "ali05_tanh_gau_all003",
            [HALF, "tanh", "gaussian"],
            "equal",
            lambda d: mean(-S * d / 2, tanh(column(TANH_S), d), -S * d**2),
        ),
        (
            "ali_05_tanh_gau_all004",
            ["exp", HALF, "tanh", "gaussian"],
            [0.25] * 4,
            lambda d: mean(-S * d, -S * d / 2, tanh(column(TANH_S), d), -S * d**2),
        ),
        (  # log((exp + (tanh + gaussian) / 2) / 2), as a comment of the code has it
            "ali_tanh_gau of unequal weights",
            ["exp", "tanh", "gaussian"],
            [0.5, 0.25, 0.25],
            lambda d: mean(-S * d, mean(tanh(column(TANH_S), d), -S * d**2)),
        ),
        (  # the same as a mixture of a mixture
            "ali and tanh_gau",
            ["exp", {"mep": {"kernels": ["tanh", "gaussian"]}}],
            "equal",
            lambda d: mean(-S * d, mean(tanh(column(TANH_S), d), -S * d**2)),
        ),
        (
            "ali_ali05_gaussian with the older Gaussian slopes",
            ["exp", HALF, {"gaussian": {"slopes": OLD_GAUSSIAN_S}}],
            "equal",
            lambda d: mean(-S * d, -S * d / 2, -column(OLD_GAUSSIAN_S) * d**2),
        ),
        ("tanh hall", ["tanh"], "equal", lambda d: tanh(column(TANH_S), d)),
        (
            "tanh h1",
            [{"tanh": {"slopes": 0.25737}}],
            "equal",
            lambda d: tanh(torch.full((12, 1), 0.25737).double(), d),
        ),
        (
            "gaussian h1",
            [{"gaussian": {"slopes": 0.01064}}],
            "equal",
            lambda d: (-0.01064 * d**2).expand(12, -1),
        ),
        (
            "ali h8, gaussian h8",
            [{"exp": {"slopes": 2**-8}}, {"gaussian": {"slopes": 2**-8}}],
            "equal",
            lambda d: mean(-(2**-8) * d, -(2**-8) * d**2).expand(12, -1),
        ),
        (
            "ali_sigmoid",
            ["exp", {"tanh": {"slopes": S[:, 0].tolist(), "slope_factor": 0.5}}],
            [2 / 3, 1 / 3],
            lambda d: mean(-S * d, torch.log(torch.sigmoid(-S * d) + 0.5e-6)) + math.log(4 / 3),
        ),
        (
            "poly",
            [{"kerple_log": {"a": 0.1, "p": 2.2}}],
            "equal",
            lambda d: (-2.2 * torch.log(1 + 0.1 * d)).expand(12, -1),
        ),
    ],
)
def test_published_mixtures_without_parameters_can_be_written(name, kernels, weights, expected):
    position = build("mep", SHAPE, kernels=kernels, weights=weights)
    assert list(position.parameters()) == []
    assert_bias(position, expected(d()))


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("gaussian_kerplelog", ["gaussian", "kerple_log"]),
        ("ali_kerplelog", ["exp", "kerple_log"]),
        ("ali05_kerplelog", [HALF, "kerple_log"]),
        ("ali05_gaussian_kerplelog", [HALF, "gaussian", "kerple_log"]),
        ("ali_ali05_gau_kerplelog", ["exp", HALF, "gaussian", "kerple_log"]),
        ("tanh_kerplelog", ["tanh", "kerple_log"]),
        ("t5_kerplelog", ["t5", "kerple_log"]),
        ("t5_kerplelog_gau", ["gaussian", "t5", "kerple_log"]),
        ("t5_kerplelog_gau_alibi", ["gaussian", "exp", "t5", "kerple_log"]),
    ],
)
def test_published_mixtures_with_parameters_can_be_written(name, kernels):
    position, distance = build("mep", SHAPE, kernels=kernels), d()
    logs = []
    for index, kernel in enumerate(kernels):
        if kernel == "kerple_log":
            logs.append(kerple(position, index, distance))
        elif kernel == "t5":
            weight = position.get_parameter(f"kernels.{index}.weight").detach().double()
            octave = (distance.clamp(min=16) / 16).log2() / math.log2(
                128 / 16
            )  # exact at powers of two
            bucket = torch.where(
                distance < 16, distance, (16 + (octave * 16).floor()).clamp(max=31)
            ).long()
            logs.append(math.sqrt(64) * weight[bucket].t())
        else:
            fixed = {
                "exp": -S * distance,
                "gaussian": -S * distance**2,
                "tanh": tanh(column(TANH_S), distance),
            }
            logs.append(-S * distance / 2 if kernel == HALF else fixed[kernel])
    assert_bias(position, mean(*logs), atol=2e-6)


def test_learned_weights_may_be_one_softmax_for_all_heads():
    position = build("mep", SHAPE, kernels=["exp", "gaussian"], weights="learned_shared")
    assert position.weight_logits.shape == (2, 1)
    assert_bias(position, mean(-S * d(), -S * d() ** 2))
    with torch.no_grad():
        position.weight_logits.copy_(torch.tensor([[math.log(3.0)], [0.0]]))
    assert_bias(position, torch.logaddexp(math.log(0.75) - S * d(), math.log(0.25) - S * d() ** 2))


@pytest.mark.parametrize(
    "name",
    [name for name, _ in FAMILY.values() if name not in ("mep", WHT1, WHT2, "kerple_bias_wht")],
)
def test_a_mixture_of_one_kernel_is_that_kernel_whichever_it_is(name):
    mixture, alone = build("mep", SHAPE, kernels=[name]), build(name, SHAPE)
    alone.load_state_dict(mixture.kernels[0].state_dict())
    torch.testing.assert_close(mixture.distance_bias(LONG), alone.distance_bias(LONG))


# Sandwich and BAM


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(("dbar", "base"), [(128, 10000.0), (64, 500.0)])
@pytest.mark.parametrize("heads", [1, 12, 32])
def test_sandwich(heads, dbar, base, first):
    position = build(
        "sandwich", Shape(heads, 64, 64 * heads, 512), dbar=dbar, base=base, first_frequency=first
    )
    i = torch.arange(first, first + dbar // 2, dtype=torch.float64)[:, None]
    distance = torch.cat([d(2000), LONG - 1 - d(2000).flip(0)])
    cosines = torch.cos(distance / base ** (2 * i / dbar)).sum(dim=0) - dbar / 2
    h = torch.arange(1, heads + 1, dtype=torch.float64)[:, None]
    found = position.distance_bias(LONG)[:, distance.long()].double()
    torch.testing.assert_close(
        found, cosines / (8 * h / heads), rtol=1e-6, atol=1e-6
    )  # to 131072, in float32


def test_bam_starts_as_alibi():
    assert_bias(build("bam", SHAPE), -S * (d() + 1e-5))
    torch.testing.assert_close(
        build("bam", SHAPE).distance_bias(LONG),
        build("alibi", SHAPE).distance_bias(LONG),
        rtol=1e-6,
        atol=1e-5,
    )


def test_bam_with_other_shapes_is_the_authors_formula():
    position = build("bam", SHAPE)
    with torch.no_grad():
        position.exponent.copy_(torch.linspace(-0.5, 3, 12))
        position.log_scale.copy_(torch.linspace(-3, 3, 12))
    exponent, log_scale = (
        position.get_parameter(name).detach().double()[:, None]
        for name in ("exponent", "log_scale")
    )
    assert_bias(position, -((d() + 1e-5) ** exponent) * torch.exp(log_scale))


@pytest.mark.parametrize("value", [-100.0, 100.0])
def test_bam_stays_finite_wherever_its_numbers_drift(value):
    position = build("bam", SHAPE)
    for exponent, log_scale in ((value, -value), (value, value)):
        with torch.no_grad():
            position.exponent.fill_(exponent)
            position.log_scale.fill_(log_scale)
        assert position.distance_bias(2**20).isfinite().all()


# What holds for all of them


@every_one
@pytest.mark.parametrize("heads", [1, 3, 32])
def test_tables_are_finite_at_131072_and_a_shorter_one_is_its_beginning(name, options, heads):
    position = build(name, Shape(heads, 8, 8 * heads, 512), **options)
    for long, short in zip(tables(position, LONG), tables(position, 777), strict=True):
        assert long.shape == (heads, LONG)
        assert long.dtype == torch.float32
        assert long.isfinite().all()
        torch.testing.assert_close(long[:, :768], short[:, :768], rtol=0, atol=0)
        torch.testing.assert_close(
            long[:, :777], short, rtol=1e-5, atol=0
        )  # its last few by scalar code


@every_one
def test_gradients_equal_finite_differences(name, options):
    position = build(name, Shape(3, 4, 12, 16), **options).double()
    with torch.no_grad():
        for value in position.parameters():
            value.uniform_(0.1, 0.9)
    names = [key for key, _ in position.named_parameters()]

    def of(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        named = {f"of.{key}": value for key, value in zip(names, values, strict=True)}
        return torch.func.functional_call(_Tables(position), named, 40)

    if names:
        assert torch.autograd.gradcheck(of, tuple(position.parameters()))
    else:
        assert not any(table.requires_grad for table in tables(position, 40))


class _Tables(torch.nn.Module):
    """All tables as a module's forward, so that functional_call can feed it parameters."""

    def __init__(self, of: Position):
        super().__init__()
        self.of = of

    def forward(self, length: int) -> tuple[torch.Tensor, ...]:
        return tuple(tables(self.of, length))


@every_one
def test_gradients_are_finite_at_131072(name, options):
    position = build(name, SHAPE, **options)
    values = list(position.parameters())
    if values:
        sum(
            (table / table.detach().abs().clamp(min=1)).mean() for table in tables(position, LONG)
        ).backward()
        assert all(value.grad.isfinite().all() for value in values)


@every_one
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_hundred_steps_keep_learned_numbers_within_bounds(name, options, dtype):
    """Toward a target that lies beyond every floor; in bfloat16 as the engine does, with float32 masters."""
    position = build(name, SHAPE, **options)
    masters = [value.detach().clone().requires_grad_() for value in position.parameters()]
    if not masters:
        return
    optimizer = torch.optim.Adam(masters, lr=0.05)
    for _ in range(100):
        for value, master in zip(position.parameters(), masters, strict=True):
            value.data = master.detach().to(dtype)
            value.grad = None
        loss = sum(
            (table - table.detach().clamp(-1e4, 1e4) - 1).square().mean()
            for table in tables(position, 300)
        )
        (loss + sum(value.float().square().mean() for value in position.parameters())).backward()
        for value, master in zip(position.parameters(), masters, strict=True):
            master.grad = value.grad.float()
        optimizer.step()
    for key, value in position.learned().items():
        low, high = position.get_submodule(key.rpartition(".")[0]).bounds.get(
            key.rpartition(".")[2], (-1e9, 1e9)
        )
        assert value.dtype == torch.float32
        assert value.isfinite().all()
        assert (value >= low).all()
        assert (value <= high).all()
    assert all(
        table.dtype == torch.float32 and table.isfinite().all() for table in tables(position, LONG)
    )
