"""Rows of made-up runs for the tests of the page, and a reader of its HTML."""

from html.parser import HTMLParser

SHARED = {
    "step": 10,
    "train_length": 512,
    "windows": 9,
    "tokens": 4608,
    "loss": 2.4,
    "corpus": "stdlib",
    "part": "valid",
}
SHARED |= {
    "protocol": "equal_tokens",
    "commit": "abc123",
    "device": "cpu",
    "tokens_per_second": 1234.5,
}
VOID = {"meta", "link", "br", "img", "input", "hr"}


def row(pos_emb, seed, length, perplexity, **more):
    found = {
        "pos_emb": pos_emb,
        "seed": seed,
        "length": length,
        "perplexity": perplexity,
        "config_hash": f"h{seed}",
    }
    return SHARED | found | {"checkpoint": f"runs/{pos_emb}-{seed}/global_step10"} | more


ROWS = [
    *(
        row("alibi", seed, n, p)
        for n, seed, p in ((512, 1, 10.0), (512, 2, 12.0), (1024, 1, 9.0), (1024, 2, 9.5))
    ),
    *(
        row("mep", 1, n, p, pos_emb_args={"kernels": ["exp", "<b>&"]})
        for n, p in ((512, 11.25), (1024, 345678.0))
    ),
    row("learned", 1, 512, 13.5),
    row("learned", 1, 1024, None, loss=None, reason="learned positions end at 512"),
]


class Reader(HTMLParser):
    """Checks that every element is closed; keeps references, and the texts of cells by table."""

    def __init__(self, page):
        super().__init__()
        self.open, self.references, self.ids, self.tables, self.texts = [], [], [], [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.references += [
            given[key] for key in ("src", "href", "xlink:href", "action") if key in given
        ]
        self.ids += [given["id"]] if "id" in given else []
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        self.texts.append(text)
        if "td" in self.open or "th" in self.open:
            self.tables[-1][-1][-1] += text
