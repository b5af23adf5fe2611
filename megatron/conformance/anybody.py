"""Checks of encodings from elsewhere: a rotation, a bias, scores, or a model of transformers."""

import copy
import inspect
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron.conformance.checks import examine_in_order
from megatron.conformance.subject import (
    FAILS,
    HOLDS,
    NOT_APPLICABLE,
    VERY_FAR,
    Finding,
    Subject,
    largest_difference,
    scores,
    table,
)
from megatron.errors import UserError
from megatron.positions.alibi import alibi_slopes

TEXT = 130  # tokens: two pieces of 64 and a rest
CONTENTS = 256  # different tokens
LONG_TEXT = 2048  # tokens for a model that takes no positions
EXACT, ROUNDED, CLOSE, COARSE = 1e-3, 0.01, 0.02, 0.05  # of the largest number
FLOOR = 1e-3  # numbers below are compared with this
ALIBI_HEADS = (8, 12)  # a power of two, and a number whose slopes are not geometric
LEARNED = {"wpe", "embed_positions", "position_embeddings"}  # transformers' names of a table


@dataclass(frozen=True)
class Setting:
    """How a text reaches a function.

    start, stride: position p of the text becomes start + stride · p
    piece: tokens that are read at once, after those of a cache; 0: all
    before, behind: tokens of padding
    later: tokens that follow the text
    packed: whether the row has the text twice
    """

    start: int = 0
    stride: int = 1
    piece: int = 0
    before: int = 0
    behind: int = 0
    later: int = 0
    packed: bool = False
    dtype: torch.dtype = torch.float32
    length: int = TEXT

    @property
    def reach(self) -> int:
        """The least length of a text with all of these positions."""
        tokens = self.before + self.length + self.later + self.behind
        return self.start + self.stride * (tokens - 1) + 2  # another row has one more


@dataclass(frozen=True)
class Probe:
    """A function of the user, and the shape in which it is called.

    length: tokens of the longest text
    like: an encoding of ours that it should equal
    silent: whether queries and keys are 0, so that scores are the bias
    """

    function: Any
    heads: int = 4
    head_dim: int = 64
    length: int = VERY_FAR
    like: Subject | None = None
    silent: bool = False

    def read(self, setting: Setting = Setting()) -> Tensor:
        """Scores of the text, 0 for later keys: [heads, TEXT, TEXT]; of a model logits."""
        text = torch.arange(setting.length + setting.later)
        columns = []
        for column in (text, setting.start + setting.stride * text, torch.ones_like(text)):
            padded = pad(column, (setting.before, setting.behind))
            columns.append(padded.repeat(1 + setting.packed).expand(2, -1))
        places, positions, mask = columns
        positions = positions + torch.tensor([[1], [0]])  # rows of a batch may differ
        result = self.result(places, positions, mask, setting).double()
        first = setting.before + setting.packed * len(text)
        return self.text(result[1], slice(first, first + setting.length))

    def result(self, places: Tensor, positions: Tensor, mask: Tensor, setting: Setting) -> Tensor:
        """Scores [2, heads, length, length], or logits [2, length, vocab].

        places: of tokens in their text, which choose their content
        """
        raise NotImplementedError

    def text(self, result: Tensor, where: slice) -> Tensor:
        """What the result of a row has for a text in it."""
        return result[:, where, where].tril()

    def content(self, places: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Queries and keys: [rows, length] -> [rows, heads, length, head_dim] each."""
        generator = torch.Generator().manual_seed(1)
        drawn = torch.randn(2, CONTENTS, self.heads, self.head_dim, generator=generator)
        q, k = drawn.to(dtype)[:, places % CONTENTS].transpose(2, 3) * (not self.silent)
        return q, k

    def by_distance(self, heads: int) -> Tensor | None:
        """The bias at distances 0, 1, … relative to that at 0: [heads, length]; None without."""
        return None

    def obstacle(self, setting: Setting) -> str:
        """Why a setting does not apply."""
        return ""

    def long_text(self, end: int) -> Setting:
        """A text that reaches a length."""
        return Setting(stride=(end - 2) // TEXT)

    def relative(self, scores: Tensor) -> Tensor:
        """Scores as they are compared."""
        return scores


class Rotation(Probe):
    """(q, k, positions [batch, length]) -> turned q and k, [batch, heads, length, head_dim]."""

    def result(self, places, positions, mask, setting):
        size = setting.piece or places.shape[1]
        turned = []
        for part, at in zip(places.split(size, 1), positions.split(size, 1), strict=True):
            turned.append(self.function(*self.content(part, setting.dtype), at))
        q, k = (torch.cat(side, dim=2).double() for side in zip(*turned, strict=True))
        return q @ k.mT / self.head_dim**0.5


class Bias(Probe):
    """(heads, queries, keys) -> [heads, queries, keys] for the last queries of a text."""

    def result(self, places, positions, mask, setting):
        length = places.shape[1]
        result = torch.zeros(self.heads, length, length, dtype=torch.float64)
        for queries in torch.arange(length).split(setting.piece or length):
            end = int(queries[-1]) + 1
            block = self.block(places[:1, :end], len(queries), setting)
            # One row for all queries, as Bloom has, is a bias too.
            block = block.reshape(block.shape[-3:])[..., setting.start :]
            result[:, queries, :end] = block.double()
        return self.relative(result).expand(2, -1, -1, -1)

    def block(self, places: Tensor, queries: int, setting: Setting) -> Tensor:
        """For the last queries of places: [heads, queries, keys]."""
        return self.function(self.heads, queries, setting.start + places.shape[1])

    def by_distance(self, heads):
        return replace(self, heads=heads, silent=True).read()[:, -1].flip(-1)

    def obstacle(self, setting):
        if setting.dtype != torch.float32 and type(self) is Bias:
            return "it takes no tensor, whose dtype it could follow"
        in_a_row = setting.before or setting.behind or setting.packed
        return "it sees neither positions nor a mask" if in_a_row else ""

    def long_text(self, end):
        return Setting(start=end - TEXT - 1)

    def relative(self, scores):
        # Softmax does not see what is added to a whole row.
        return scores - scores.diagonal(dim1=-2, dim2=-1)[..., None]


class Scores(Bias):
    """(q, k) -> scores before softmax [batch, heads, queries, keys], q the last places of k."""

    def block(self, places, queries, setting):
        q, k = self.content(places, setting.dtype)
        earlier = k[:, :, :1].expand(-1, -1, setting.start, -1)
        return self.function(q[:, :, -queries:], torch.cat([earlier, k], dim=2))


class Model(Probe):
    """A causal model of transformers; of its logits."""

    def result(self, places, positions, mask, setting):
        model = self.function
        if model.dtype != setting.dtype:
            model = copy.deepcopy(model).to(setting.dtype)
            # from_pretrained(dtype=) leaves frequencies in float32 too.
            for name, buffer in self.function.named_buffers():
                if name.endswith("inv_freq"):
                    model.get_buffer(name).data = buffer
        vocab = model.config.get_text_config().vocab_size
        generator = torch.Generator().manual_seed(1)
        ids = torch.randperm(vocab, generator=generator)[places % min(CONTENTS, vocab)]
        inputs: dict[str, Any] = {"use_cache": bool(setting.piece)}
        if setting != Setting(piece=setting.piece, dtype=setting.dtype, length=setting.length):
            if self.takes_positions:
                inputs["position_ids"] = positions
            if not setting.packed:  # transformers finds packed texts where no mask is given
                inputs["attention_mask"] = mask
        logits = []
        for part in ids.split(setting.piece or ids.shape[1], dim=1):
            output = model(part, **inputs)
            inputs["past_key_values"] = output.get("past_key_values")
            logits.append(output.logits)
        return torch.cat(logits, dim=1)

    def text(self, result, where):
        return result[where]

    def by_distance(self, heads):
        """From the attention of the first layer to a token that is repeated."""
        model = copy.deepcopy(self.function).float()
        model.set_attn_implementation("eager")
        ids = torch.zeros(1, TEXT, dtype=torch.long)
        weights = model(ids, output_attentions=True).attentions[0].double()
        bias = weights[0, :, -1].log().flip(-1)
        bias = bias - bias[:, :1]
        return bias if is_linear(bias) else None

    @property
    def takes_positions(self) -> bool:
        return "position_ids" in inspect.signature(self.function.forward).parameters

    def obstacle(self, setting):
        if not self.takes_positions and (setting.start or setting.stride > 1 or setting.packed):
            return "it takes no position_ids"
        names = {name.rpartition(".")[2] for name, _ in self.function.named_modules()}
        if setting.start and names & LEARNED:
            return "it adds learned positions to embeddings"
        return ""

    def long_text(self, end):
        if self.takes_positions:
            return super().long_text(end)
        return Setting(length=min(end, LONG_TEXT) - 1)


def is_linear(bias: Tensor) -> bool:
    """Whether a bias changes by the same step at each distance: [heads, length]."""
    steps = bias.diff()
    error = (steps - steps[:, :1]).abs()
    return bool(steps.any() and (error <= 0.01 * steps[:, :1].abs() + 1e-5).all())


def difference(result: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest number that is expected."""
    return largest_difference(result, expected) / max(float(expected.abs().max()), FLOOR)


def at_most(allowed: float, off: float, where: str) -> Finding:
    """Holds if numbers are not further off than allowed."""
    verdict = HOLDS if off <= allowed else FAILS
    return Finding(verdict, f"{where}: off by {off:.2g} of the largest number")


def same(probe: Probe, settings: dict[str, Setting], allowed: float = EXACT) -> Finding:
    """Whether the text gets the same in each setting as alone: the first fault, or the last."""
    finding = Finding(NOT_APPLICABLE, f"{probe.length} tokens are too few")
    for where, setting in settings.items():
        if problem := probe.obstacle(setting):
            return Finding(NOT_APPLICABLE, problem)
        if setting.reach > probe.length:
            continue
        # What bfloat16 rounds is compared with the same text in float32.
        in_float32 = replace(setting, dtype=torch.float32)
        expected = probe.read(Setting() if setting == in_float32 else in_float32)
        finding = at_most(allowed, difference(probe.read(setting), expected), where)
        if finding.verdict == FAILS:
            break
    return finding


def turns_pairs(probe: Probe) -> Finding:
    """Features turn in pairs"""
    if not isinstance(probe, Rotation):
        return Finding(NOT_APPLICABLE, "it is no function that turns q and k")
    size = probe.head_dim
    basis = torch.eye(size).expand(1, probe.heads, -1, -1)  # each row has one feature
    turned, turned_k = probe.function(basis, basis, torch.ones(1, size, dtype=torch.long))
    mixed = turned[0, 0] * (1 - torch.eye(size))
    partner = mixed.abs().argmax(dim=1)
    features = mixed.any(dim=1).nonzero()[:, 0]
    if not len(features):
        return Finding(FAILS, "position 1 turns nothing")
    if not torch.equal(turned != 0, turned_k != 0):
        return Finding(FAILS, "q and k have different pairs")
    if not torch.equal(partner[partner[features]], features):
        return Finding(FAILS, "it mixes other features, or does not read positions")
    first, other = int(features[0]), int(partner[features[0]])
    name = {1: "neighbours", len(features) // 2: "halves"}.get(other - first, "other pairs")
    sign = "" if mixed[first, other] > 0 else ", backwards"
    return Finding(
        HOLDS, f"{name}: {first} turns with {other}{sign}; {len(features)} of {size} turn"
    )


def authors_slopes(probe: Probe) -> Finding:
    """Slopes of ALiBi are its authors'"""
    agrees, differs = [], []
    for heads in sorted({probe.heads, *ALIBI_HEADS}):
        if heads != probe.heads and isinstance(probe, Model):
            continue
        bias = probe.by_distance(heads)
        if bias is None or not is_linear(bias):
            return Finding(NOT_APPLICABLE, "it has no bias that is linear in the distance")
        slopes = -bias.diff().mean(dim=1)
        authors = torch.tensor(alibi_slopes(heads)).double()
        geometric = 0.5 ** (8 * torch.arange(1, heads + 1).double() / heads)
        if torch.allclose(slopes, authors, rtol=0.01):
            agrees.append(heads)
            continue
        name = "geometric" if torch.allclose(slopes, geometric, rtol=0.01) else "others"
        first = f"{slopes[0]:.3g} for {authors[0]:.3g}"
        differs.append(f"{name}, not the authors' at {heads} heads: the first is {first}")
    if not differs:
        return Finding(HOLDS, f"at {', '.join(map(str, agrees))} heads")
    return Finding(FAILS if agrees else NOT_APPLICABLE, differs[-1])


def never_grows(probe: Probe) -> Finding:
    """A bias falls with the distance"""
    bias = probe.by_distance(probe.heads)
    if bias is None or not bias.any():
        return Finding(NOT_APPLICABLE, "it has no bias by distance")
    growing = int(((bias.diff() >= 0).all(dim=1) & (bias[:, -1] > 0)).sum())
    last = f"at distance {TEXT - 1} {bias[:, -1].min():.3g} to {bias[:, -1].max():.3g}"
    if growing == len(bias) and bias.max() > 1:  # less may be an untrained network
        return Finding(FAILS, f"it grows in every head: {last}")
    return Finding(HOLDS, f"{last}; heads that grow: {growing}")


def shifts(probe: Probe) -> Finding:
    """A shift of all positions"""
    settings = {f"by {start}": Setting(start=start) for start in (1, 7, 120)}
    return same(probe, settings, ROUNDED)  # some have tables of cosines in bfloat16


def pieces(probe: Probe) -> Finding:
    """Pieces of 1, 7 and 64, with a cache"""
    return same(probe, {f"pieces of {piece}": Setting(piece=piece) for piece in (1, 7, 64)})


def padding_before(probe: Probe) -> Finding:
    """Padding before a text"""
    return same(probe, {"9 tokens": Setting(before=9)})


def padding_behind(probe: Probe) -> Finding:
    """Padding behind a text"""
    return same(probe, {"9 tokens": Setting(behind=9)})


def packed(probe: Probe) -> Finding:
    """Texts packed into a row"""
    return same(probe, {"the second text": Setting(packed=True)})


def lengths(probe: Probe) -> list[int]:
    """Lengths of texts to be tried: up to the longest."""
    return [length for length in (512, 4096, 32768, probe.length) if length <= probe.length]


def far_in_float32(probe: Probe) -> Finding:
    """float32, the last tokens of a long text"""
    ends = {f"at {end:,}": Setting(start=end - TEXT - 1) for end in lengths(probe)}
    return same(probe, ends, CLOSE)


def far_in_bfloat16(probe: Probe) -> Finding:
    """bfloat16, a long text"""
    short = Setting(dtype=torch.bfloat16)
    settings = {}
    for end in lengths(probe):
        settings[f"up to {end:,}"] = replace(probe.long_text(end), dtype=short.dtype)
    # A short text shows what else bfloat16 rounds.
    rounding = difference(probe.read(short), probe.read())
    return same(probe, settings, COARSE + 3 * rounding)


def later_tokens(probe: Probe) -> Finding:
    """Later tokens"""
    return same(probe, {f"{later} more": Setting(later=later) for later in (1, 64, 3000)})


def agrees_with_ours(probe: Probe) -> Finding:
    """Agreement with an encoding of ours"""
    if probe.like is None:
        return Finding(NOT_APPLICABLE, "name it with --as, or encoding=")
    subject = replace(probe.like, heads=probe.heads, head_dim=probe.head_dim)
    position = subject.position().double()
    if type(probe) is Bias:
        probe = replace(probe, silent=True)
    q, k = probe.content(torch.arange(TEXT)[None], torch.float64)
    ours = probe.relative(scores(position, q, k)[0]).tril()
    return at_most(EXACT, difference(probe.read(), ours), subject.name)


CHECKS = (
    turns_pairs,
    authors_slopes,
    never_grows,
    shifts,
    pieces,
    padding_before,
    padding_behind,
    packed,
    far_in_float32,
    far_in_bfloat16,
    later_tokens,
    agrees_with_ours,
)
KINDS: dict[tuple[str, ...], type[Probe]] = {
    ("q", "k", "positions"): Rotation,
    ("heads", "queries", "keys"): Bias,
    ("q", "k"): Scores,
}


def probe_of(subject: Any, like: Subject | None, length: int | None, **shape: Any) -> Probe:
    """What a callable is by the names of its parameters; or a model."""
    names = tuple(inspect.signature(getattr(subject, "forward", subject)).parameters)
    if hasattr(subject, "config"):
        if like is not None:
            raise UserError("--as: a model has more than its encoding; give the function alone")
        config = subject.config.get_text_config()
        longest = length or getattr(config, "max_position_embeddings", VERY_FAR)
        return Model(subject.eval(), config.num_attention_heads, length=longest)
    for parameters, kind in KINDS.items():
        if names[: len(parameters)] == parameters:
            return kind(subject, like=like, length=length or VERY_FAR, **shape)
    choices = ", ".join(f"({', '.join(parameters)})" for parameters in KINDS)
    taken = ", ".join(names)
    raise UserError(f"parameters ({taken}) do not say what it is; take one of {choices}")


@torch.no_grad()
def examine_anything(
    subject: Any, like: Subject | None = None, length: int | None = None, **shape: Any
) -> list[Finding]:
    """The findings of all checks, in order; UserError for what cannot be called."""
    if like is not None:
        like.position()
    try:
        probe = probe_of(subject, like, length, **shape)
        first = probe.read()
    except UserError:
        raise
    except Exception as fault:
        raise UserError(f"it stops with {type(fault).__name__}: {fault}") from fault
    if not isinstance(probe, Model) and first.shape != (probe.heads, TEXT, TEXT):
        raise UserError(f"it gives scores of shape {list(first.shape)}: {type(probe).__doc__}")
    return examine_in_order(probe, CHECKS)


def check(
    subject: Any,
    encoding: str | None = None,
    *,
    heads: int = 4,
    head_dim: int = 64,
    length: int | None = None,
    **options: Any,
) -> list[Finding]:
    """Raise AssertionError with the table of findings if something fails: for tests of anybody.

    subject: a function (q, k, positions), (heads, queries, keys) or (q, k), or a model
    encoding, options: what it should equal, as pos_emb and pos_emb_args
    length: tokens of the longest text; by default 131072, or what a model names
    """
    like = Subject(encoding, options) if encoding else None
    findings = examine_anything(subject, like, length, heads=heads, head_dim=head_dim)
    if any(finding.verdict == FAILS for finding in findings):
        raise AssertionError("\n" + table(findings))
    return findings
