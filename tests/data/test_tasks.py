"""Problems of tasks: their answers by solvers that read the words alone, their sizes and parts."""

import hashlib
import itertools
import re
import string
from collections import Counter

import numpy as np
import pytest
import yaml

from megatron.data import tasks
from megatron.data.tasks import PADDING, TASKS, TaskText
from megatron.data.tokenizers.build import Bytes
from megatron.data.tokenizers.tokenizer import description
from megatron.data.tokens import TokenWriter
from prepare_data import run
from tests.support import ROOT

CASES = [
    *((name, {}) for name in TASKS),
    ("addition", {"order": "forward"}),
    ("selective_copy", {"letters": 3}),
    ("recall", {"pairs": 1}),
    ("recall", {"pairs": 26}),
    ("recall", {"asked": "last"}),
    ("needle", {"needles": 5, "digits": 7}),
    ("variable_tracking", {"chains": 1, "hops": 0}),
    ("variable_tracking", {"chains": 4, "hops": 5}),
    ("flip_flop", {"ignored": 0.0}),
    ("flip_flop", {"ignored": 1}),
    ("word_problem", {"group": "S3"}),
    ("word_problem", {"group": "S4"}),
]


def title(name, options):
    return " ".join([name, *map(str, options.values())])


TITLES = [title(*case) for case in CASES]
every_case = pytest.mark.parametrize(("name", "options"), CASES, ids=TITLES)


# --- Solvers: the words of a problem -> {place: word} of its answer ---


def at_the_end(words, answer):
    """An answer behind everything that is given."""
    return dict(zip(range(len(words) - len(answer), len(words)), answer, strict=True))


def given(words):
    """The words before `=`, of as many that an answer repeats."""
    return words[: words.index("=")]


def alphabetical(letters):
    return [letter for letter in string.ascii_lowercase for _ in range(letters.count(letter))]


def added(words, order):
    match = re.fullmatch(r"(\d+)\+(\d+)=\d+", "".join(words))
    turn = -1 if order == "reversed" else 1
    first, second = (int(digits[::turn]) for digits in match.groups())
    assert len(match[1]) == len(match[2])
    return f"{first + second:0{len(match[1]) + 1}}"[::turn]


def recalled(words):
    """The second time a key stands there, its value follows again."""
    values, answers = {}, {}
    for place, word in enumerate(words):
        if word in values:
            answers[place + 1] = values[word]
        elif word.isupper():
            values[word] = words[place + 1]
    assert len(answers) == len(values) == len(set(values.values()))
    return answers


def found_needle(words):
    text = "".join(words)
    key = re.search(r"\?(\w)\d+$", text)[1]
    return re.search(rf"{key}(\d+)", text)[1]


def found_number(words):
    """Of the digits behind the sentence, which is asked for by its repetition."""
    found, repeated = re.findall(r"Thepasskeyis(\d+)", "".join(words))
    assert found == repeated
    return found


def tracked(words):
    text = "".join(words)
    value = re.search(r"\?(\w)=\d$", text)[1]
    statements = dict(re.findall(r"(\w)=(\w)", text.partition("?")[0]))
    while not value.isdigit():
        value = statements[value]
    return value


def read_bits(words):
    answers, pairs = {}, zip(words[::2], words[1::2], strict=True)
    for number, (instruction, bit) in enumerate(pairs):
        if instruction == "w":
            memory = bit
        if instruction == "r":
            answers[2 * number + 1] = memory
    return answers


def product(words):
    """By matrices: row i of a permutation has its one in the column of where i goes."""
    size = len(words[0])
    matrices = [np.eye(size)[[int(place) - 1 for place in word]] for word in given(words)]
    whole = np.linalg.multi_dot(matrices) if len(matrices) > 1 else matrices[0]
    return "".join(str(column + 1) for column in whole.argmax(axis=1))


SOLVERS = {
    "copy": lambda words: at_the_end(words, given(words)),
    "reverse": lambda words: at_the_end(words, given(words)[::-1]),
    "sorting": lambda words: at_the_end(words, alphabetical(given(words))),
    "parity": lambda words: at_the_end(words, str(int("".join(given(words)), 2).bit_count() % 2)),
    "addition": lambda words, order="reversed": at_the_end(words, added(words, order)),
    "selective_copy": lambda words: at_the_end(words, re.findall("[a-z]", "".join(given(words)))),
    "induction": lambda words: at_the_end(words, re.search("!(.)", "".join(words))[1]),
    "recall": recalled,
    "needle": lambda words: at_the_end(words, found_needle(words)),
    "passkey": lambda words: at_the_end(words, found_number(words)),
    "variable_tracking": lambda words: at_the_end(words, tracked(words)),
    "flip_flop": read_bits,
    "word_problem": lambda words: at_the_end(words, [product(words)]),
}


@every_case
def test_answers_are_those_of_a_solver_and_alone_are_marked(name, options):
    text = TaskText(name, options)
    given_to_solver = options if name == "addition" else {}
    smallest, _ = text._tokens_by_size
    for more, part, seed in itertools.product((10, 30), ("train", "valid", "test"), (1, 2**32 - 1)):
        samples = text.samples(part, smallest + more, seed)
        for number in (*range(12), 2**33):
            ids, marks = samples[number]
            assert ids.dtype == marks.dtype == np.int64
            assert ids.shape == marks.shape == (smallest + more + 1,)
            assert not ids.any() or ids[: np.flatnonzero(ids)[-1] + 1].all()  # padding at the end
            words = [text.words[number] for number in ids[ids > 0]]
            expected = SOLVERS[name](words, **given_to_solver)
            places = np.flatnonzero(marks).tolist()
            assert {place: words[place] for place in places} == expected
            assert 0 < places[-1] < len(words)


@every_case
def test_a_window_has_the_largest_problem_that_fits_and_too_short_ones_are_refused(name, options):
    text = TaskText(name, options)
    smallest, more = text._tokens_by_size
    with pytest.raises(ValueError, match=f"seq_length: .* use {smallest - 1} or more"):
        text.largest(smallest - 2)
    for length in range(smallest + 12, smallest + 18):
        ids, marks = text.windows("valid", length, 3).swapaxes(0, 1)
        tokens = set((ids > 0).sum(axis=1).tolist())
        assert tokens == {smallest + (length + 1 - smallest) // more * more}
        assert marks.any(axis=1).all()
    sizes = range(1, text.largest(smallest + 3 * more) + 1)
    samples = text.samples("train", smallest + 3 * more, 0)
    counts = {int((samples[number][0] > 0).sum()) for number in range(100)}
    assert counts == {smallest + more * step for step in range(len(sizes))}


def test_no_problem_is_measured_twice():
    windows = TaskText("parity").windows("valid", 8, 320)  # of 7 bits: 128 problems in all parts
    assert len({window.tobytes() for window in windows}) == len(windows)
    assert 8 < len(windows) < 32
    assert len(TaskText("parity").windows("valid", 32, 320)) == 320


def test_the_vocabulary_is_the_words_that_occur():
    for name in TASKS:
        text = TaskText(name)
        assert text.words[0] == PADDING
        assert len(set(text.words)) == len(text.words) == text.meta["tokenizer"]["vocab_size"]
        used = np.unique(np.stack([text.samples("train", 160, 0)[i][0] for i in range(200)]))
        if name != "flip_flop":  # without w, r or i at its ends
            assert len(used) == len(text.words)


def test_the_guides_task_can_be_added():
    guide = (ROOT / "docs/tasks.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    try:
        exec(code, vars(tasks) | {})
        words, marks = zip(*TaskText("first_letter", {"repeats": 2}).generate(3), strict=True)
    finally:
        TASKS.pop("first_letter")
    assert words[3:] == ("=", words[0], words[0])
    assert marks == (False,) * 4 + (True, True)


def test_tasks_are_listed():
    listed = [line.split(" ")[0] for line in run(["--list"]).split("\n\n")[1].splitlines()]
    assert listed == [f"task:{name}" for name in TASKS]


# --- Around a text ---

TEXT = "It was a Quiet night, and Nobody in the house had asked for 7 apples or a Pear. "
SENTENCE = " The pass key is"


@pytest.fixture
def written(tmp_path):
    """A function that gives the prefix of a token file with these texts in bytes."""

    def write(*texts):
        meta = {"tokenizer": description(Bytes())}
        with TokenWriter(tmp_path / "text", np.uint16, meta=meta) as writer:
            for text in texts:
                writer.add([*text.encode(), 0])
        return str(tmp_path / "text")

    return write


def characters(windows):
    """Of each window: its text without the padding, and the places of its answer."""
    for ids, marks in windows:
        size = np.flatnonzero(ids)[-1] + 1
        yield bytes(ids[:size].tolist()).decode(), np.flatnonzero(marks).tolist()


def test_a_passkey_stands_in_the_text_and_its_digits_alone_are_asked_for(written):
    text = TaskText("passkey", {"text": written(*[TEXT] * 9)}, Bytes())
    assert text.meta["tokenizer"]["type"] == "CharLevelTokenizer"
    assert text.changed_options == {"text": "text"}
    starts, depths = set(), set()
    for problem, places in characters(text.windows("valid", 200, 40)):
        digits = re.search(rf"{SENTENCE}((?: \d){{5}})$", problem)[1]
        assert places == [*range(len(problem) - 9, len(problem), 2)]
        before, after = problem.removesuffix(SENTENCE + digits).split(SENTENCE + digits)
        filler = before + after
        assert filler in f"{TEXT}\0" * 9
        # Every word counts as one of the longest, " pass": 18 words of 5, and one of the filler.
        assert len(filler) == 1 + 201 - 91
        starts.add(filler)
        depths.add(len(before) // 40)
    assert len(starts) > 20
    assert depths == {0, 1, 2}


@pytest.mark.parametrize("asked", ["among", "last"])
def test_keys_in_a_text_stand_before_their_values_alone(written, asked):
    text = TaskText("recall", {"text": written(TEXT), "asked": asked}, Bytes())
    for problem, places in characters(text.windows("valid", 190, 20)):  # longer than the text
        pairs = re.findall("([A-Z]) ([a-z])", problem)
        keys = [key for key, count in Counter(key for key, _ in pairs).items() if count == 2]
        assert len(keys) == 4
        for key in keys:
            (first, _), (_, second) = (match.span() for match in re.finditer(f" {key} .", problem))
            assert problem.count(key) == 2
            assert problem[first : first + 4] == problem[second - 4 : second]
            assert second - 1 in places
        assert len(places) == 4
        edge = problem[:16] if asked == "among" else problem[-16:]
        assert re.fullmatch("( [A-Z] [a-z]){4}", edge)


# --- Parts and seeds ---


def problems(name, part, length, count, seed=0):
    """Texts of problems with their answers, of all sizes that fit."""
    samples = TaskText(name).samples(part, length, seed)
    return {str(samples.problem(number)) for number in range(count)}


def test_parts_have_no_problem_in_common_whatever_the_seed():
    """Of so many small problems that every part has nearly all of its own."""
    for name, length in (("parity", 9), ("copy", 4), ("addition", 6)):
        train = problems(name, "train", length, 900) | problems(name, "train", length, 300, 7)
        valid, test = (problems(name, part, length, 200, 3) for part in ("valid", "test"))
        assert len(train | valid | test) == len(train) + len(valid) + len(test)
        assert min(len(valid), len(test)) > 8


DIGESTS = yaml.safe_load((ROOT / "tests/data/tasks.yml").read_text(encoding="utf-8"))


@every_case
def test_a_seed_gives_the_same_problems_on_every_machine(name, options):
    text = TaskText(name, options)
    length = text._tokens_by_size[0] + 20
    digest = hashlib.sha256()
    for samples in (text.samples("train", length, 1234), text.samples("valid", length, 5)):
        for number in range(20):
            digest.update(samples[number].astype("<i8").tobytes())
    digest.update(text.windows("test", length + 7, 5).astype("<i8").tobytes())
    assert digest.hexdigest()[:12] == DIGESTS[title(name, options)]
