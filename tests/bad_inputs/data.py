"""Bad text and tokenizers."""

from tests.bad_inputs.case import Case

# A file, what it holds, the options, and the message.
TEXTS: dict[str, tuple[str, str | bytes, str, str]] = {
    "line-is-no-json": (
        "c.jsonl",
        '{"text": "good"}\n{\n',
        "-t CharLevelTokenizer",
        ("c.jsonl:2: is not JSON in UTF-8 (Expecting property name"),
    ),
    "line-is-a-list": (
        "c.jsonl",
        '{"text": "good"}\n[1]\n',
        "-t CharLevelTokenizer",
        ("c.jsonl:2: has no text under 'text', it has no keys - say which one"),
    ),
    "line-without-the-key": (
        "c.jsonl",
        '{"text": "good"}\n{"txt": "a"}\n',
        "-t CharLevelTokenizer",
        ("c.jsonl:2: has no text under 'text', it has the keys txt - say which one"),
    ),
    "text-is-a-number": (
        "c.jsonl",
        '{"text": "good"}\n{"text": 1}\n',
        "-t CharLevelTokenizer",
        "c.jsonl:2: has no text under 'text', it has the keys text - say which one",
    ),
    "line-is-no-utf8": (
        "c.jsonl",
        b'{"text": "\xff"}\n',
        "-t CharLevelTokenizer",
        "c.jsonl:1: is not JSON in UTF-8 ('utf-8' codec can't decode",
    ),
    "no-text-at-all": (
        "c.jsonl",
        '{"text": ""}\n',
        "-t CharLevelTokenizer",
        "c: the input has no documents with text in them - nothing was written",
    ),
    "gzip-is-plain-text": (
        "c.jsonl.gz",
        '{"text": "good"}\n',
        "-t CharLevelTokenizer",
        ("c.jsonl.gz: is cut off or damaged (Not a gzipped file (b'{\"')) - copy it again"),
    ),
    "text-is-no-utf8": (
        "c.txt",
        b"abc\xff",
        "-t CharLevelTokenizer",
        "c.txt: is not UTF-8 (byte 3) - convert the file",
    ),
    "unknown-kind-is-binary": (
        "c.bin",
        b"\x00\x01",
        "-t CharLevelTokenizer",
        (
            "--input: c.bin is neither UTF-8 text nor of a kind that is read - use "
            ".jsonl, .jsonl.gz, .json.gz, .jsonl.zst, .txt, .txt.gz, .txt.zst, .parquet, "
            ".arrow, .tar, .tar.gz, .tgz, .tar.zst (if a folder holds other files too, name "
            "yours one by one)"
        ),
    ),
    "document-over-the-limit": (
        "c.txt",
        "a" * 1_000_001,
        "-t CharLevelTokenizer --max-document-mb 1",
        ("c.txt: is longer than 1 MB, which would fill the memory"),
    ),
    "limit-of-nothing": (
        "c.jsonl",
        '{"text": "good"}\n',
        "--max-document-mb 0",
        "--max-document-mb: 0 is too small - use 1 or more",
    ),
    "no-workers": (
        "c.jsonl",
        '{"text": "good"}\n',
        "--workers 0",
        ("--workers: 0 is too small - use 1 or more"),
    ),
    "unknown-tokenizer": (
        "c.jsonl",
        '{"text": "good"}\n',
        "-t HFTokeniser",
        (
            "tokenizer_type: there is no 'HFTokeniser' - did you mean HFTokenizer? "
            "There are GPT2BPETokenizer, HFTokenizer, HFGPT2Tokenizer, SPMTokenizer, "
            "TiktokenTokenizer, CharLevelTokenizer"
        ),
    ),
    "vocabulary-too-small": (
        "c.jsonl",
        '{"text": "good"}\n',
        "--vocab-size 10",
        ("vocab_size: 10 cannot hold the 256 bytes and <|endoftext|> - use at least 257"),
    ),
    "tokenizer-missing": (
        "c.jsonl",
        '{"text": "good"}\n',
        "--vocab-file none.json",
        (
            "vocab_file: there is no file none.json (looked from {here}) - give "
            "the path of an existing file"
        ),
    ),
    "merges-missing": (
        "c.jsonl",
        '{"text": "good"}\n',
        "-t GPT2BPETokenizer --vocab-file c.jsonl",
        ("merge_file: GPT2BPETokenizer needs one - give the path of its merges.txt"),
    ),
}
# A tokenizer.json, and what is said of it.
TOKENIZERS: dict[str, tuple[str | bytes, str]] = {
    "tokenizer-is-empty": ("", "t.json is empty, or larger than any tokenizer's file"),
    "tokenizer-is-no-json": ("{", "HFTokenizer reads a tokenizer.json, t.json is not one"),
    "tokenizer-model-of-unknown-type": (
        '{"model": {"type": "X"}}',
        ("the library cannot read t.json: data did not match any"),
    ),
    "tokenizer-is-no-utf8": (b"\xff\xfe{", "t.json is not text - give a tokenizer's file"),
    "tokenizer-is-a-bare-vocabulary": (
        '{"a": 1}',
        ("t.json is not one - a bare vocabulary needs"),
    ),
    "tokenizer-pattern-unrolls": (
        ('{"model": {}, "pre_tokenizer": {"pattern": {"Regex": "((a{1000}){1000}){1000}"}}}'),
        ("the library cannot read t.json"),
    ),
}

CASES: list[Case] = [
    Case(
        "name-with-a-slash",
        ["prepare_data.py", "--input", "c.jsonl", "--name", "a/b"],
        ("--name: 'a/b' cannot be a folder's name - use letters, digits, '_', '-' and '.'"),
        files={"c.jsonl": '{"text": "good"}\n'},
    ),
    Case(
        "nothing-to-prepare",
        ["prepare_data.py"],
        (
            "prepare_data.py: what is to be prepared? - name a corpus (--list shows "
            "them), or give "
            "--input FILE --name NAME"
        ),
    ),
    Case(
        "corpus-unknown",
        ["prepare_data.py", "stdlb"],
        (
            "stdlb: there is no corpus of this name - did you mean stdlib? Known are arxiv, "
            "arxiv-redpajama, c4, environment, enwik8, fineweb-edu, github, github-redpajama, "
            "openwebtext2, pg19, pile, slimpajama, stdlib, wikitext103; for a data set of the "
            "Hugging Face hub write hf:OWNER/NAME; for your own text use --input FILE --name stdlb"
        ),
    ),
    Case(
        "corpus-from-another-folder",
        ["prepare_data.py", "enwik8", "--from-dir", ".", "-t", "CharLevelTokenizer"],
        (
            "--from-dir: . has no files of enwik8, which are enwik8.zip - look for them there, or "
            "prepare your own text: --input . --name enwik8"
        ),
        files={"other.txt": "text"},
    ),
    Case(
        "input-missing",
        ["prepare_data.py", "--input", "none.txt", "--name", "c"],
        ("--input: none.txt is neither a file nor a folder with files in it"),
    ),
    Case(
        "verify-nothing",
        ["prepare_data.py", "--verify", "none"],
        (
            "data_path: there are no token files none.bin and none.idx (looked from "
            "{here}) - make them with prepare_data.py, for instance `python "
            "prepare_data.py stdlib`"
        ),
    ),
    Case(
        "half-a-pair",
        ["prepare_data.py", "--verify", "c"],
        (
            "data_path: c.idx is missing, its partner exists - copy both files again, or "
            "make them anew with prepare_data.py"
        ),
        files={"c.bin": b"\x00"},
    ),
]
PREPARE = ["prepare_data.py", "--name", "c", "-d", "data", "--input"]
for name, (file, content, options, message) in TEXTS.items():
    CASES.append(Case(name, [*PREPARE, file, *options.split()], message, files={file: content}))
for name, (content, message) in TOKENIZERS.items():
    files = {"c.txt": "text", "t.json": content}
    words = [*PREPARE, "c.txt", "--vocab-file", "t.json"]
    CASES.append(Case(name, words, message, files=files))
