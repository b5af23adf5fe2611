import json
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokenizers.train import train_tokenizer
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


def test_both_forms_of_one_tokenizer_give_the_same_ids(files):
    pair = build_tokenizer("GPT2BPETokenizer", files / "vocab.json", files / "merges.txt")
    whole = build_tokenizer("HFTokenizer", files / "tokenizer.json")
    assert pair.encode_batch(TEXTS) == whole.encode_batch(TEXTS)
    assert (pair.eod, pair.vocab_size, whole.eod, whole.vocab_size) == (0, 280, 0, 280)


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


def test_every_tokenizer_gives_the_text_back(files):
    paths = {"GPT2BPETokenizer": ("vocab.json", "merges.txt"), "HFTokenizer": ("tokenizer.json",)}
    for kind in ("GPT2BPETokenizer", "HFTokenizer", "CharLevelTokenizer"):
        tokenizer = build_tokenizer(kind, *(files / name for name in paths.get(kind, ())))
        for text in (" leading and trailing \n\n", "naïve — 日本語 🙂", "a\tb\r\n", ""):
            ids = tokenizer.encode(text)
            assert all(0 <= number < tokenizer.vocab_size for number in ids)
            assert tokenizer.decode(ids) == text
        assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]
        ids = tokenizer.encode("one<|endoftext|>two")
        assert tokenizer.eod not in ids
        assert tokenizer.decode(ids) == "one<|endoftext|>two"


@needs_gpt2
def test_gpt2_is_gpt2():
    pair = build_tokenizer(
        "GPT2BPETokenizer", SHARED / "gpt2-vocab.json", SHARED / "gpt2-merges.txt"
    )
    for tokenizer in (pair, build_tokenizer("HFTokenizer", SHARED / "gpt2-tokenizer.json")):
        assert (tokenizer.vocab_size, tokenizer.eod) == (50257, 50256)
        assert tokenizer.encode("Hello world") == [15496, 995]
        fox = [464, 2068, 7586, 21831, 18045, 625, 262, 16931, 3290]
        assert tokenizer.encode("The quick brown fox jumps over the lazy dog") == fox


def test_a_vocabulary_that_cannot_be_trained_is_refused():
    with pytest.raises(UserError, match=r"^vocab_size: 256 cannot hold the 256 bytes and .*257"):
        train_tokenizer(TEXTS, 256)
    with pytest.raises(UserError, match=r"100000000000000 is more than any .* at most 4000000"):
        train_tokenizer(TEXTS, 10**14)


def test_wrong_files_are_explained(files, tmp_path):
    vocab = json.loads((files / "vocab.json").read_text())
    contents = {
        "empty": " \n",
        "numbers": json.dumps({"a": 0, "b": 0, "<|endoftext|>": 1}),
        "highest": json.dumps(vocab | {"the": 10**8}),
        "endless": json.dumps({k: v for k, v in vocab.items() if k != "<|endoftext|>"}),
        "foreign": "#version: 0.2\nzq xq\n",
        "newer": (files / "tokenizer.json").read_text().replace('"BPE"', '"NoSuch"'),
    }
    for name, text in contents.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x01")
    Tokenizer(WordLevel({"hello": 0}, unk_token="hello")).save(str(tmp_path / "no_end"))
    for name in ("vocab.json", "merges.txt", "tokenizer.json"):
        (tmp_path / name).write_bytes((files / name).read_bytes())
    pair, whole = "GPT2BPETokenizer", "HFTokenizer"
    for kind, names, message in (
        (pair, [], "vocab_file: GPT2BPETokenizer needs one - give the path of its vocab.json"),
        (pair, ["vocab.json"], "merge_file: GPT2BPETokenizer needs one"),
        (pair, ["gone", "merges.txt"], f"vocab_file: there is no file {tmp_path}/gone (looked"),
        (pair, ["vocab.json", "empty"], f"merge_file: {tmp_path}/empty is empty"),
        (pair, ["binary", "merges.txt"], f"vocab_file: {tmp_path}/binary is not text"),
        (pair, ["merges.txt", "vocab.json"], "are not GPT-2's vocab.json and merges.txt - give"),
        (pair, ["tokenizer.json", "merges.txt"], "is read by tokenizer_type: HFTokenizer"),
        (pair, ["numbers", "merges.txt"], "does not give every token its own number"),
        (pair, ["highest", "merges.txt"], "gives a token the number 100000000, but has only 280"),
        (pair, ["endless", "merges.txt"], "lacks 1 of the 256 bytes and <|endoftext|>"),
        (pair, ["vocab.json", "foreign"], f"merge_file: {tmp_path}/foreign does not belong to"),
        (whole, ["vocab.json"], "is not one - a bare vocabulary needs tokenizer_type: GPT2BPE"),
        (whole, ["newer"], f"the library cannot read {tmp_path}/newer"),
        (whole, ["no_end"], "has no <|endoftext|>, which ends every document, and no eos_token"),
        ("charlevel", [], "tokenizer_type: there is no 'charlevel' - did you mean CharLevelTok"),
    ):
        with pytest.raises(UserError) as caught:
            build_tokenizer(kind, *(tmp_path / name for name in names))
        assert message in str(caught.value)


def test_without_endoftext_the_end_is_what_the_file_beside_it_says(tmp_path):
    file, settings = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
    Tokenizer(WordLevel({"Hello": 0, "</s>": 1, "world": 2}, unk_token="Hello")).save(str(file))
    settings.write_text(json.dumps({"eos_token": "<end>"}))
    with pytest.raises(UserError, match=r"no eos_token of tokenizer_config.json beside it"):
        build_tokenizer("HFTokenizer", file)
    hashes = set()
    for end, number in (("</s>", 1), ({"content": "</s>", "lstrip": False}, 1), ("world", 2)):
        settings.write_text(json.dumps({"eos_token": end}))
        found = build_tokenizer("HFTokenizer", file)
        assert found.eod == number
        hashes.add(found.hash)
    assert len(hashes) == 2  # token files of one are not those of the other
