"""Tasks: small problems that need distant tokens, as endless texts (docs/tasks.md).

`data_path: task:NAME` selects a task, and `task_args` sets its options.

A problem is one window: a question, its answer, and padding. Only tokens of answers count for loss
and accuracy. Training draws problems of every size that fits into a window, a measurement only the
largest size. Nothing is stored on disk: a problem follows from the seed and its number.

`task_args: {text: PREFIX}` replaces a task's filler by the tokens of a text, and the task's words
are encoded with the tokenizer of that text.

In the papers problems are sentences with an end token. Here a word is one token, there are no
instructions in words, and no end token is predicted, because the size of a problem determines the
size of its answer.
"""

import hashlib
import inspect
import itertools
import json
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray
from pydantic import BaseModel, Field, ValidationError, create_model

from megatron.data.tokenizers.tokenizer import Tokenizer, hash_of
from megatron.data.tokens import TokenFile
from megatron.errors import UserError, did_you_mean, in_words
from megatron.protocols import first_tokens
from megatron.splits import PARTS, TASK_PREFIX

PADDING = "<pad>"
ENDLESS = 1 << 40  # problems
HELD_OUT = {0: "test", 1: "valid"}  # of eight problems; the others are trained on
MOST_DRAWS = 10_000  # for one problem of a part
DRAWS = 10  # draws per problem of a measurement, because many are drawn twice

Problem = list[tuple[str, bool]]  # words, and whether each belongs to an answer
Few = Annotated[int, Field(ge=1, le=64)]
Chains = Annotated[int, Field(ge=1, le=10)]
Hops = Annotated[int, Field(ge=0)]
Names = Annotated[int, Field(ge=1, le=26)]  # as many problems as there are


class Task(NamedTuple):
    """A kind of problem.

    generate: (random, size, **options) -> a problem; its number of tokens grows with the size, from
        1 on, by the same number each
    words: all words of its problems; or (**options) -> all words
    filler: those of them that a text can replace
    """

    generate: Callable[..., Problem]
    words: Sequence[str] | Callable[..., Sequence[str]]
    filler: str = ""

    @property
    def options(self) -> type[BaseModel]:
        """The options with their types and defaults."""
        _, _, *parameters = inspect.signature(self.generate).parameters.values()
        fields: dict[str, Any] = {}
        for parameter in parameters:
            fields[parameter.name] = (parameter.annotation, parameter.default)
        if self.filler:
            fields["text"] = (str | None, None)
        return create_model("Options", __config__={"extra": "forbid", "strict": True}, **fields)

    @property
    def defaults(self) -> dict:
        """The options with their defaults."""
        return self.options().model_dump()


TASKS: dict[str, Task] = {}


def listing() -> str:
    """One line for each task: its name, what it is, and its options with their defaults."""
    width = max(map(len, TASKS)) + len(TASK_PREFIX)
    lines = []
    for name, task in TASKS.items():
        title, *_ = (task.generate.__doc__ or "").splitlines()
        options = ", ".join(f"{key}: {value}" for key, value in task.defaults.items())
        about = f"{title} | task_args {{{options}}}" if options else title
        lines.append(f"{TASK_PREFIX + name:{width}} | {about}")
    return "\n".join(lines)


def register(words: Sequence[str] | Callable[..., Sequence[str]], filler: str = "") -> Callable:
    """Register a generator under its function name; words and filler: see Task."""

    def add(generate: Callable[..., Problem]) -> Callable[..., Problem]:
        TASKS[generate.__name__] = Task(generate, words, filler)
        return generate

    return add


def question(*words: str) -> Problem:
    """Words of the question."""
    return [(word, False) for word in words]


def answer(*words: str) -> Problem:
    """Words of the answer."""
    return [(word, True) for word in words]


def drawn(random: RandomState, words: Sequence[str], count: int) -> list[str]:
    """This many words, drawn with replacement."""
    return [str(words[number]) for number in random.randint(len(words), size=count).tolist()]


def without_repeats(random: RandomState, words: Sequence[str], count: int) -> list[str]:
    """This many different words."""
    return [str(words[number]) for number in random.permutation(len(words))[:count].tolist()]


def scattered(random: RandomState, pieces: Sequence[Problem], filler: Sequence[str]) -> Problem:
    """Insert pieces, in their order, at random places of a filler."""
    places = np.sort(random.randint(len(filler) + 1, size=len(pieces))).tolist()
    problem: Problem = []
    before = 0
    for place, piece in zip(places, pieces, strict=True):
        problem += question(*filler[before:place]) + piece
        before = place
    return problem + question(*filler[before:])


LETTERS, NAMES, DIGITS = string.ascii_lowercase, string.ascii_uppercase, string.digits


# --- Sequences (2305.19466, section 3; 2207.02098) ---


@register("=" + LETTERS)
def copy(random: RandomState, size: int) -> Problem:
    """Repeat the letters."""
    letters = drawn(random, LETTERS, size)
    return question(*letters, "=") + answer(*letters)


@register("=" + LETTERS)
def reverse(random: RandomState, size: int) -> Problem:
    """Repeat the letters from the last to the first."""
    letters = drawn(random, LETTERS, size)
    return question(*letters, "=") + answer(*reversed(letters))


@register("=" + LETTERS)
def sorting(random: RandomState, size: int) -> Problem:
    """Repeat the letters in the order of the alphabet."""
    letters = drawn(random, LETTERS, size)
    return question(*letters, "=") + answer(*sorted(letters))


@register("=01")
def parity(random: RandomState, size: int) -> Problem:
    """Whether the number of ones is odd; asked only at the end."""
    bits = random.randint(2, size=size)
    return question(*map(str, bits), "=") + answer(str(bits.sum() % 2))


@register("+=" + DIGITS)
def addition(
    random: RandomState, size: int, order: Literal["forward", "reversed"] = "reversed"
) -> Problem:
    """Add two numbers of `size` digits. order: forward, or reversed (ones first).

    Reversed, a digit depends on its own column and a carry: 2307.03381 reverses the sum, 2402.09371
    all three numbers, as here. Zeros in front make both numbers equally long; in 2305.19466 they
    are not.
    """
    first, second = drawn(random, DIGITS, size), drawn(random, DIGITS, size)
    result = []  # the ones first
    carry = 0
    for column in zip(reversed(first), reversed(second), strict=True):
        carry, digit = divmod(sum(map(int, column)) + carry, 10)
        result.append(str(digit))
    result.append(str(carry))
    if order == "reversed":
        first.reverse()
        second.reverse()
    else:
        result.reverse()
    return question(*first, "+", *second, "=") + answer(*result)


# --- Recall among other tokens (2312.04927, 2312.00752, 2404.06654) ---


@register("=." + LETTERS)
def selective_copy(random: RandomState, size: int, letters: Few = 8) -> Problem:
    """Repeat a few letters that are hidden among `size` - 1 blanks (2312.00752, 4.1.1).

    letters: 16 of 4,096 tokens in the paper
    """
    marked = drawn(random, LETTERS, letters)
    problem = scattered(random, list(map(question, marked)), "." * (size - 1))
    return problem + question("=") + answer(*marked)


@register("!" + LETTERS)
def induction(random: RandomState, size: int) -> Problem:
    """The letter after the mark, when the mark is repeated (2209.11895; 2312.00752, 4.1.2)."""
    letter = drawn(random, LETTERS, 1)
    filler = drawn(random, LETTERS, size)
    return scattered(random, [question("!", *letter)], filler) + question("!") + answer(*letter)


@register(DIGITS + LETTERS + NAMES, filler=DIGITS)
def recall(
    random: RandomState, size: int, pairs: Names = 4, asked: Literal["among", "last"] = "among"
) -> Problem:
    """The values of several keys, asked for among `size` other tokens (MQAR, 2312.04927).

    In the paper distances follow a power law; here they are uniform. The other tokens are neither
    keys nor values, and in the answer a value follows its repeated key, as in a text.
    asked: among the other tokens, or last: then the pairs are among them and the keys at the end
    """
    keys = without_repeats(random, NAMES, pairs)
    values = without_repeats(random, LETTERS, pairs)
    bindings = list(map(question, keys, values))
    order = random.permutation(pairs).tolist()
    repeated = [question(keys[number]) + answer(values[number]) for number in order]
    filler = drawn(random, DIGITS, size)
    if asked == "last":
        return scattered(random, bindings, filler) + list(itertools.chain(*repeated))
    return list(itertools.chain(*bindings)) + scattered(random, repeated, filler)


@register("?" + DIGITS + LETTERS + NAMES, filler=LETTERS)
def needle(random: RandomState, size: int, needles: Names = 1, digits: Few = 3) -> Problem:
    """The number after one of the keys that are hidden among `size` letters (RULER, 2404.06654).

    needles: more than one means RULER's multi-key needles. Without `text` the letters are random.
    """
    keys = without_repeats(random, NAMES, needles)
    numbers = [drawn(random, DIGITS, digits) for _ in keys]
    pieces = [question(key, *number) for key, number in zip(keys, numbers, strict=True)]
    hidden = scattered(random, pieces, drawn(random, LETTERS, size))
    needle = random.randint(needles)
    return hidden + question("?", keys[needle]) + answer(*numbers[needle])


SENTENCE = ("The", "pass", "key", "is")


@register((".", *SENTENCE, *DIGITS), filler=".")
def passkey(random: RandomState, size: int, digits: Few = 5) -> Problem:
    """The number that a sentence among `size` blanks names (2305.16300)."""
    number = drawn(random, DIGITS, digits)
    hidden = scattered(random, [question(*SENTENCE, *number)], "." * size)
    return hidden + question(*SENTENCE) + answer(*number)


@register("=?" + DIGITS + LETTERS + NAMES, filler=LETTERS)
def variable_tracking(
    random: RandomState, size: int, chains: Chains = 2, hops: Hops = 2
) -> Problem:
    """The value of a variable that was assigned through other variables (RULER, 2404.06654).

    Each of `chains` values goes through `hops` further variables, among `size` letters. RULER asks
    for all variables of a value; we ask for the value of a chain's last variable.
    """
    if chains * (hops + 1) > len(NAMES):
        raise UserError(
            f"task_args.hops: {chains} chains of {hops} hops need more than {len(NAMES)} names -"
            " use fewer"
        )
    names = without_repeats(random, NAMES, chains * (hops + 1))
    values = without_repeats(random, DIGITS, chains)
    # Statements of all chains are mixed, but each chain keeps its order.
    turns = random.permutation(np.repeat(np.arange(chains), hops + 1))
    last = list(values)  # of each chain: what its next variable is set to
    statements = []
    for name, chain in zip(names, turns, strict=True):
        statements.append(question(name, "=", last[chain]))
        last[chain] = name
    chain = random.randint(chains)
    text = scattered(random, statements, drawn(random, LETTERS, size))
    return text + question("?", last[chain], "=") + answer(values[chain])


# --- States (2306.00946, 2404.08819) ---


@register("wri01")
def flip_flop(
    random: RandomState, size: int, ignored: Annotated[float, Field(ge=0, le=1)] = 0.8
) -> Problem:
    """The last written value, among `size` + 1 instructions to write, read or ignore (2306.00946).

    `ignored`: share of the instructions between the first, a write, and the last, a read
    """
    rest = (1 - ignored) / 2
    bounds = np.searchsorted([rest, 2 * rest], random.random_sample(size + 1), side="right")
    instructions = ["wri"[number] for number in bounds]
    instructions[0], instructions[-1] = "w", "r"
    problem: Problem = []
    memory = ""
    for instruction, bit in zip(instructions, drawn(random, "01", size + 1), strict=True):
        if instruction == "w":
            memory = bit
        problem += question(instruction)
        problem += answer(memory) if instruction == "r" else question(bit)
    return problem


def _elements(group: str) -> list[str]:
    return list(map("".join, itertools.permutations("12345"[: int(group[1])])))


@register(lambda group: ("=", *_elements(group)))
def word_problem(
    random: RandomState, size: int, group: Literal["S3", "S4", "S5"] = "S5"
) -> Problem:
    """The product of permutations, each applied after the one before (2404.08819, 2505.16381).

    group: S3, S4 or S5. A permutation is one token that says where 1, 2, 3, … go. The papers ask
        for the product of every prefix, we only for the whole product.
    """
    elements = drawn(random, _elements(group), size)
    product = elements[0]
    for element in elements[1:]:
        product = "".join(element[int(place) - 1] for place in product)
    return question(*elements, "=") + answer(product)


# --- As a text for training and measurements ---


@dataclass(frozen=True)
class TaskText:
    """The problems of a task with its options, with the interface of a token file.

    name: such as copy; options: may be only those that differ from Task.defaults
    tokenizer: of the text in the options; None if it is not available
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Tokenizer | None = None

    def __post_init__(self) -> None:
        if self.name not in TASKS:
            guess = did_you_mean(self.name, TASKS)
            raise UserError(
                f"data_path: there is no task '{self.name[:40]}' - {guess} The tasks are"
                f" {', '.join(TASKS)}"
            )
        task = TASKS[self.name]
        try:
            task.options.model_validate(dict(self.options))
        except ValidationError as fault:
            has = ", ".join(task.defaults) or "none"
            raise UserError(f"task_args: {in_words(fault)} - {self.name} has {has}") from None
        self.generate(1)  # which checks all options together

    @cached_property
    def all_options(self) -> dict:
        """The options of its problems, all except the text."""
        options = TASKS[self.name].defaults | dict(self.options)
        options.pop("text", None)
        return options

    @property
    def changed_options(self) -> dict:
        """The options that are not at their defaults; a text is given by its file name."""
        defaults = TASKS[self.name].defaults
        changed = {key: value for key, value in self.options.items() if value != defaults[key]}
        return changed | ({"text": self.filler.prefix.name} if self.filler else {})

    @cached_property
    def filler(self) -> TokenFile | None:
        """The text that replaces the task's own filler, or None."""
        if (prefix := self.options.get("text")) is None:
            return None
        try:
            return TokenFile(prefix)
        except UserError as fault:
            raise UserError(str(fault).replace("data_path:", "task_args.text:", 1)) from None

    @cached_property
    def words(self) -> list[str]:
        """The vocabulary: the id of a word is its place in the list."""
        words = TASKS[self.name].words
        return [PADDING, *(words(**self.all_options) if callable(words) else words)]

    @cached_property
    def ids(self) -> dict[str, list[int]]:
        """The ids of each word: its place in the vocabulary, or from the text's tokenizer."""
        if self.filler is None:
            return {word: [number] for number, word in enumerate(self.words)}
        if self.tokenizer is None:
            raise UserError(
                f"task_args.text: {self.filler.prefix} needs the tokenizer that wrote it, but it"
                " was not found (evaluate.py looks in the checkpoint and next to the text) - set"
                " tokenizer_type and vocab_file"
            )
        _, *words = self.words
        return {word: self.tokenizer.encode(f" {word}") for word in words}

    @cached_property
    def _random(self) -> RandomState:
        """One generator, which is seeded again for each problem: making a new one would cost more
        than a problem."""
        return RandomState(0)

    def generate(self, size: int) -> Problem:
        """A problem of this size from the next draws of `_random`."""
        return TASKS[self.name].generate(self._random, size, **self.all_options)

    @cached_property
    def _tokens_by_size(self) -> tuple[int, int]:
        """(tokens of the smallest problem, tokens that each further size adds).

        In a text every word counts as long as the longest one.
        """
        longest = max(map(len, self.ids.values()))
        replaced = self._replaced
        smallest, second = (
            sum(1 if word in replaced else longest for word, _ in self.generate(size))
            for size in (1, 2)
        )
        return smallest, second - smallest

    def tokens(self, problem: Problem) -> list[tuple[int, bool]]:
        """The ids of a problem, and whether each is an answer.

        If a word has several tokens, only the last one counts as an answer. The others are mostly a
        space.
        """
        columns = []
        piece = self._piece([word for word, _ in problem])
        for word, is_answer in problem:
            *before, last = [next(piece)] if word in self._replaced else self.ids[word]
            columns += [*((token, False) for token in before), (last, is_answer)]
        return columns

    @cached_property
    def _replaced(self) -> str:
        """The words that are replaced by tokens of the text."""
        return TASKS[self.name].filler if self.filler else ""

    def _piece(self, words: Sequence[str]) -> Iterator[int]:
        """Tokens of the text from a random place on, as many as we replace.

        They exclude the names among the words, which may only occur before their own values.
        """
        if text := self.filler:
            count = sum(word in self._replaced for word in words)
            document = self._random.randint(len(text))
            start = self._random.randint(max(1, text.sizes[document]))
            order = itertools.chain(range(document + 1, len(text)), range(document + 1))
            rest = first_tokens(text, order, count)
            piece = np.concatenate([text.read(document, start, count), rest])
            names = [self.ids[word][-1] for word in words if word in NAMES]
            # A text that is too short is repeated.
            yield from np.resize(piece[~np.isin(piece, names)], count).tolist()

    def largest(self, length: int) -> int:
        """The largest size of a problem in a window of `length` inputs.

        Raises UserError if none fits.
        """
        tokens, more = self._tokens_by_size
        if tokens > length + 1:
            raise UserError(
                f"seq_length: a window of {length} tokens is too short for {self.prefix}, whose"
                f" smallest problem has {tokens} - use {tokens - 1} or more"
            )
        return 1 + (length + 1 - tokens) // more

    def samples(self, part: str, length: int, seed: int) -> "TaskSamples":
        """Problems of all sizes, for a training."""
        return TaskSamples(self, part, seed, length, range(1, self.largest(length) + 1))

    def windows(self, part: str, length: int, count: int) -> NDArray[np.int64]:
        """The first problems of the largest size, for measurements: [count, 2, length + 1].

        They are the same for every model and all different; fewer if that many draws give fewer.
        """
        largest = self.largest(length)
        samples = TaskSamples(self, part, 0, length, range(largest, largest + 1))
        windows = {}
        for number in range(DRAWS * count):
            window = samples[number]
            windows.setdefault(window.tobytes(), window)
            if len(windows) == count:
                break
        return np.stack(list(windows.values()))

    # The interface of a token file.

    @property
    def prefix(self) -> Path:
        return Path(f"{TASK_PREFIX}{self.name}")

    @cached_property
    def meta(self) -> dict:
        if self.filler:
            return self.filler.meta | {"corpus": str(self.prefix)}
        words = self.words
        described = {"type": "task", "hash": hash_of(*words), "vocab_size": len(words), "eod": 0}
        return {"corpus": str(self.prefix), "tokenizer": described}

    text_bytes: ClassVar[None] = None

    def identity(self) -> dict:
        """What tells it from another text."""
        digest = hash_of(self.name, json.dumps(self.all_options, sort_keys=True))
        facts = {"path": str(self.prefix), "documents": 0, "tokens": 0, "sha256": ""}
        return facts | {"digest": digest}

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raises UserError, because a task needs no tokenizer."""
        raise UserError(
            f"tokenizer_type: {self.prefix} has its own vocabulary and doesn't use {tokenizer.name}"
            " - remove tokenizer_type, vocab_file and merge_file"
        )

    def check_ends(self, key: str, end: int | None) -> None:
        """Raises UserError, because a window has one problem and no end token."""
        raise UserError(f"{key}: {self.prefix} has no documents - set {key}: false")


@dataclass(frozen=True)
class TaskSamples:
    """Endless problems of a part, as windows of length + 1 tokens; sizes: the sizes that occur."""

    text: TaskText
    part: str
    seed: int
    length: int
    sizes: range

    def __len__(self) -> int:
        return ENDLESS

    def problem(self, number: int) -> Problem:
        """One problem.

        The parts have no problem in common, because a problem's text decides its part.
        """
        random = self.text._random
        random.seed([PARTS.index(self.part), self.seed, number % 2**32, number >> 32])
        for _ in range(MOST_DRAWS):
            problem = self.text.generate(self.sizes[random.randint(len(self.sizes))])
            words = " ".join(word for word, _ in problem)
            place = hashlib.blake2b(words.encode(), digest_size=1).digest()[0] % 8
            if HELD_OUT.get(place, "train") == self.part:
                return problem
        raise UserError(
            f"{self.text.prefix}: has no {self.part} problem of size {self.sizes[0]} to"
            f" {self.sizes[-1]} - use longer windows"
        )

    def __getitem__(self, number: int) -> NDArray[np.int64]:
        """[2, length + 1] int64: ids, and 1 where a token belongs to an answer."""
        columns = self.text.tokens(self.problem(number))
        window = np.zeros((2, self.length + 1), dtype=np.int64)
        window[:, : len(columns)] = np.transpose(columns)
        return window
