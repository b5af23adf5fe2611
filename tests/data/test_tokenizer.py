import json
import random
from functools import partial
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokenizers.train import train_sentence_pieces, train_tokenizer
from megatron.errors import UserError

SHARED = Path(__file__).parents[3] / "shared" / "data"
needs_gpt2 = pytest.mark.skipif(
    not (SHARED / "gpt2-vocab.json").exists(), reason=f"no GPT-2 files in {SHARED}"
)
TEXTS = ["the cat sat on the mat\n", "the dog sat on the cat\n", "def cat(): return 'mat'\n"] * 5


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A tokenizer trained here, in both forms.

    One is tokenizer.json, the other vocab.json with merges.txt, as OpenAI wrote them.
    """
    folder = tmp_path_factory.mktemp("tokenizer")
    text = train_tokenizer(TEXTS, 280)
    (folder / "tokenizer.json").write_text(text)
    model = json.loads(text)["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    return folder


@pytest.fixture(params=["GPT2BPETokenizer", "HFTokenizer", "CharLevelTokenizer"])
def tokenizer(request, files):
    paths = {"GPT2BPETokenizer": ("vocab.json", "merges.txt"), "HFTokenizer": ("tokenizer.json",)}
    return build_tokenizer(request.param, *(files / name for name in paths.get(request.param, ())))


def test_every_tokenizer_gives_the_text_back(tokenizer):
    for text in ("the cat", " leading and trailing \n\n", "naïve — 日本語 🙂", "a\tb\r\n", ""):
        ids = tokenizer.encode(text)
        assert all(0 <= number < tokenizer.vocab_size for number in ids)
        assert tokenizer.decode(ids) == text


def test_a_batch_is_encoded_like_its_texts(tokenizer):
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]


def test_a_document_cannot_contain_its_own_end(tokenizer):
    ids = tokenizer.encode("one<|endoftext|>two")
    assert tokenizer.eod not in ids
    assert tokenizer.decode(ids) == "one<|endoftext|>two"


def test_both_forms_of_one_tokenizer_give_the_same_ids(files):
    pair = build_tokenizer("GPT2BPETokenizer", files / "vocab.json", files / "merges.txt")
    whole = build_tokenizer("HFTokenizer", files / "tokenizer.json")
    assert pair.encode_batch(TEXTS) == whole.encode_batch(TEXTS)
    assert (pair.eod, pair.vocab_size, whole.eod, whole.vocab_size) == (0, 280, 0, 280)


def test_a_vocabulary_may_have_the_word_model(files, tmp_path):
    vocab = json.loads((files / "vocab.json").read_text())
    (tmp_path / "vocab.json").write_text(json.dumps(vocab | {"model": len(vocab)}))
    assert (
        build_tokenizer(
            "GPT2BPETokenizer", tmp_path / "vocab.json", files / "merges.txt"
        ).vocab_size
        == 281
    )


def test_the_hash_names_the_contents(files, tmp_path):
    copy = tmp_path / "elsewhere.json"
    copy.write_bytes((files / "tokenizer.json").read_bytes())
    same = build_tokenizer("HFTokenizer", copy).hash
    assert same == build_tokenizer("HFTokenizer", files / "tokenizer.json").hash
    assert len(same) == 12
    copy.write_text(train_tokenizer(TEXTS, 270))
    assert build_tokenizer("HFTokenizer", copy).hash != same


def test_training_gives_the_same_tokenizer_every_time():
    random.seed(3)
    texts = ["".join(random.choices("abcdef \n", k=500)) for _ in range(40)]
    assert train_tokenizer(texts, 400) == train_tokenizer(iter(texts), 400)


def test_training_needs_room_for_the_bytes():
    with pytest.raises(
        UserError, match=r"vocab_size: 256 cannot hold the 256 bytes and .* - use at least 257"
    ):
        train_tokenizer(TEXTS, 256)


@pytest.mark.parametrize("train", [train_tokenizer, partial(train_sentence_pieces, model="bpe")])
@pytest.mark.parametrize(
    ("size", "message"),
    [(0, "cannot hold the 256 bytes"), (10**14, "is more than any .* - use at most 4000000")],
)
def test_a_vocabulary_that_no_library_could_train_is_refused(train, size, message):
    with pytest.raises(UserError, match=f"^vocab_size: {size} {message}"):
        train(TEXTS, size)


def test_truncation_padding_and_frames_that_a_tokenizer_json_asks_for_are_not_applied(
    files, tmp_path
):
    asking = Tokenizer.from_file(str(files / "tokenizer.json"))
    asking.enable_truncation(2)
    asking.enable_padding(length=50)
    asking.save(str(tmp_path / "tokenizer.json"))
    ids = build_tokenizer("HFTokenizer", tmp_path / "tokenizer.json").encode_batch([TEXTS[0]])
    assert ids == [build_tokenizer("HFTokenizer", files / "tokenizer.json").encode(TEXTS[0])]


def test_bytes_are_those_of_gpt_neox():
    tokenizer = build_tokenizer("CharLevelTokenizer")
    assert tokenizer.encode("Aé") == [65, 0xC3, 0xA9]
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.name) == (512, 0, "CharLevelTokenizer")
    assert tokenizer.decode([72, 105, 300]) == "Hi"


@needs_gpt2
@pytest.mark.parametrize("kind", ["GPT2BPETokenizer", "HFTokenizer"])
def test_gpt2_is_gpt2(kind):
    names = {
        "GPT2BPETokenizer": ["gpt2-vocab.json", "gpt2-merges.txt"],
        "HFTokenizer": ["gpt2-tokenizer.json"],
    }
    tokenizer = build_tokenizer(kind, *(SHARED / name for name in names[kind]))
    assert (tokenizer.vocab_size, tokenizer.eod) == (50257, 50256)
    assert tokenizer.encode("Hello world") == [15496, 995]
    assert tokenizer.encode("hello") == [31373]
    assert tokenizer.encode(" hello") == [23748]
    fox = [464, 2068, 7586, 21831, 18045, 625, 262, 16931, 3290]
    assert tokenizer.encode("The quick brown fox jumps over the lazy dog") == fox


def faults(files, tmp_path):
    """Bad files beside good ones."""
    vocab = json.loads((files / "vocab.json").read_text())
    contents = {
        "empty": "",
        "blank": " \n",
        "braces": "{}",
        "numbers": json.dumps({"a": 0, "b": 0, "<|endoftext|>": 1}),
        "endless": json.dumps({k: v for k, v in vocab.items() if k != "<|endoftext|>"}),
        "words": json.dumps({"hello": 0, "<|endoftext|>": 1}),
        "foreign": "#version: 0.2\nzq xq\n",
    }
    for name, text in contents.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x01")
    whole = Tokenizer.from_file(str(files / "tokenizer.json"))
    whole.save(str(tmp_path / "whole"))
    content = json.loads((tmp_path / "whole").read_text())
    content["model"]["type"] = "NoSuch"
    (tmp_path / "newer").write_text(json.dumps(content))
    Tokenizer(WordLevel({"hello": 0}, unk_token="hello")).save(str(tmp_path / "no_end"))
    no_unknown = WordLevel({"<|endoftext|>": 0}, unk_token="[UNK]")
    Tokenizer(no_unknown).save(str(tmp_path / "no_unknown"))
    hollow = Tokenizer.from_file(str(files / "tokenizer.json"))
    hollow.model = type(hollow.model)()
    hollow.save(str(tmp_path / "hollow"))
    for name in ("vocab.json", "merges.txt", "tokenizer.json"):
        (tmp_path / name).write_bytes((files / name).read_bytes())


@pytest.mark.parametrize(
    ("kind", "names", "message"),
    [
        (
            "GPT2BPETokenizer",
            [],
            "vocab_file: GPT2BPETokenizer needs one - give the path of its vocab.json",
        ),
        (
            "GPT2BPETokenizer",
            ["vocab.json"],
            "merge_file: GPT2BPETokenizer needs one - give the path of its merges.txt",
        ),
        (
            "GPT2BPETokenizer",
            ["gone", "merges.txt"],
            "vocab_file: there is no file {}/gone (looked from",
        ),
        (
            "GPT2BPETokenizer",
            ["vocab.json", "gone"],
            "merge_file: there is no file {}/gone (looked from",
        ),
        (
            "GPT2BPETokenizer",
            ["empty", "merges.txt"],
            "vocab_file: {}/empty is empty - copy it again",
        ),
        (
            "GPT2BPETokenizer",
            ["vocab.json", "blank"],
            "merge_file: {}/blank is empty - copy it again",
        ),
        ("GPT2BPETokenizer", ["binary", "merges.txt"], "vocab_file: {}/binary is not text"),
        (
            "GPT2BPETokenizer",
            ["merges.txt", "vocab.json"],
            "is not JSON - vocab_file and merge_file are swapped",
        ),
        ("GPT2BPETokenizer", ["merges.txt", "merges.txt"], "is not JSON - give GPT-2's vocab.json"),
        (
            "GPT2BPETokenizer",
            ["vocab.json", "vocab.json"],
            "merge_file: {}/vocab.json is JSON, not a list of merges",
        ),
        (
            "GPT2BPETokenizer",
            ["tokenizer.json", "merges.txt"],
            "is a whole tokenizer.json - use tokenizer_type: HFToken",
        ),
        (
            "GPT2BPETokenizer",
            ["braces", "merges.txt"],
            "vocab_file: {}/braces has no entries - copy it again",
        ),
        ("GPT2BPETokenizer", ["numbers", "merges.txt"], "does not give every token its own number"),
        (
            "GPT2BPETokenizer",
            ["endless", "merges.txt"],
            "has no <|endoftext|>, which ends every document",
        ),
        ("GPT2BPETokenizer", ["words", "merges.txt"], "lacks 256 of the 256 bytes"),
        (
            "GPT2BPETokenizer",
            ["vocab.json", "foreign"],
            "merge_file: {}/foreign does not belong to {}/vocab.json",
        ),
        (
            "HFTokenizer",
            [],
            "vocab_file: HFTokenizer needs one - give the path of its tokenizer.json",
        ),
        ("HFTokenizer", ["gone"], "vocab_file: there is no file {}/gone"),
        ("HFTokenizer", ["empty"], "vocab_file: {}/empty is empty"),
        (
            "HFTokenizer",
            ["vocab.json"],
            "is a bare vocabulary: it needs tokenizer_type: GPT2BPETokenizer",
        ),
        (
            "HFTokenizer",
            ["merges.txt"],
            "HFTokenizer reads a tokenizer.json, {}/merges.txt is not one",
        ),
        ("HFTokenizer", ["newer"], "vocab_file: {}/newer cannot be read by tokenizers 0."),
        (
            "HFTokenizer",
            ["no_end"],
            "has no <|endoftext|>, which ends every document, and no eos_token of tokenizer_config",
        ),
        ("HFTokenizer", ["no_unknown"], "cannot encode 'Hello world': WordLevel error"),
        ("HFTokenizer", ["hollow"], "turns 'Hello world' into nothing, its vocabulary is empty"),
        ("GPT2BPE", [], "tokenizer_type: there is no 'GPT2BPE' - did you mean GPT2BPETokenizer?"),
        (
            "charlevel",
            [],
            "tokenizer_type: there is no 'charlevel' - did you mean CharLevelTokenizer?",
        ),
    ],
)
def test_wrong_files_are_explained(files, tmp_path, kind, names, message):
    faults(files, tmp_path)
    with pytest.raises(UserError) as caught:
        build_tokenizer(kind, *(tmp_path / name for name in names))
    assert message.format(tmp_path, tmp_path) in str(caught.value)


@pytest.mark.parametrize("end", ["</s>", {"content": "</s>", "lstrip": False}])
def test_without_endoftext_the_end_is_what_the_file_beside_it_says(end, tmp_path):
    file = tmp_path / "tokenizer.json"
    Tokenizer(WordLevel({"Hello": 0, "</s>": 1, "world": 2}, unk_token="Hello")).save(str(file))
    settings = tmp_path / "tokenizer_config.json"
    for absent in ("{}", json.dumps({"eos_token": "<end>"}), "no json"):
        settings.write_text(absent)
        with pytest.raises(UserError, match=r"no eos_token of tokenizer_config.json beside it"):
            build_tokenizer("HFTokenizer", file)
    settings.write_text(json.dumps({"eos_token": end}))
    found = build_tokenizer("HFTokenizer", file)
    assert found.eod == 1
    settings.write_text(json.dumps({"eos_token": "world"}))
    other = build_tokenizer("HFTokenizer", file)
    assert other.eod == 2
    assert other.hash != found.hash  # token files of one are not those of the other
