"""Pieces of HTML: tables that sort and copy, figures, sections."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Cell:
    """One cell: what is read, the number that it is sorted by, its spread, and what the pointer tells."""

    text: str
    value: float | None = None
    spread: str = ""
    title: str = ""
    kind: str = ""  # best, missing, pair, text, text long

    def html(self) -> str:
        marks = f' class="{self.kind}"' if self.kind else ""
        marks += (
            f' data-value="{self.value!r}"'
            if self.value is not None
            else ' data-value="NaN"' * self.missing
        )
        marks += f' title="{escape(self.title)}"' if self.title else ""
        spread = f' <span class="spread">{escape(self.spread)}</span>' if self.spread else ""
        return f"<td{marks}>{escape(self.text)}{spread}</td>"

    @classmethod
    def of_text(cls, text: str) -> "Cell":
        """Words instead of a number; long ones may break."""
        return cls(text, kind="text long" if len(text) > 24 else "text")

    @property
    def missing(self) -> bool:
        return self.kind == "missing"


def table(head: Sequence[str], body: Iterable[Sequence[Cell]]) -> str:
    """A table whose columns sort at a click, with buttons that copy it."""
    body = [*body]
    marks = (
        [' class="text"' if "text" in cell.kind else "" for cell in body[0]]
        if body
        else [""] * len(head)
    )
    headings = "".join(
        f'<th scope="col"{mark}><button type="button">{escape(text)}</button></th>'
        for text, mark in zip(head, marks, strict=True)
    )
    lines = "\n".join("<tr>" + "".join(cell.html() for cell in line) + "</tr>" for line in body)
    buttons = "".join(
        f'<button type="button" data-copy="{kind}">copy as {name}</button>'
        for kind, name in (("markdown", "Markdown"), ("latex", "LaTeX"))
    )
    return (
        f'<div class="table"><div class="scroll"><table><thead><tr>{headings}</tr></thead>\n<tbody>{lines}</tbody>'
        f'</table></div><div class="copy">{buttons}</div></div>'
    )


def figure(svg: str, caption: str = "", *, wide: bool = False) -> str:
    """A drawing with what is said beneath it."""
    said = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    opening = '<figure class="wide">' if wide else "<figure>"
    return f"{opening}{svg}{said}</figure>"


def paragraph(text: str, kind: str = "") -> str:
    mark = f' class="{kind}"' if kind else ""
    return f"<p{mark}>{escape(text)}</p>"


def items(texts: Iterable[str]) -> str:
    told = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f'<ul class="notes">{told}</ul>' if told else ""


def document(title: str, lead: str, sections: Sequence[tuple[str, str]]) -> str:
    """A whole page of (heading, content), with its style and script inside."""
    style, script = ((HERE / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    links = "".join(
        f'<a href="#s{number}">{escape(name)}</a>' for number, (name, _) in enumerate(sections)
    )
    parts = "\n".join(
        f'<section id="s{number}"><h2>{escape(name)}</h2>\n{content}</section>'
        for number, (name, content) in enumerate(sections)
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n{lead}\n<nav>{links}</nav>\n{parts}\n<script>\n{script}</script>\n</body>\n</html>\n"
    )
