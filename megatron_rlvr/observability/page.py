"""A report as sections of text, tables and pictures, written as Markdown or as one HTML file that needs no other."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; }
th, td { border-bottom: 1px solid #ddd; padding: .25rem .7rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; height: auto; }
"""


@dataclass(frozen=True)
class Table:
    """Rows of text below a header; columns after the first are aligned to the right."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass
class Section:
    """A heading with what stands below it: text, then tables, then pictures (PNG files)."""

    title: str
    text: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    pictures: list[Path] = field(default_factory=list)


def to_markdown(title: str, sections: Sequence[Section], root: Path) -> str:
    """The page for readers of text; pictures are linked relative to `root`."""
    parts = [f"# {title}"]
    for section in sections:
        parts += [f"## {section.title}"] if section.title else []
        parts += section.text
        parts += ["\n".join(_markdown_rows(table)) for table in section.tables]
        parts += [f"![{path.stem}]({path.relative_to(root).as_posix()})" for path in section.pictures]
    return "\n\n".join(parts) + "\n"


def to_html(title: str, sections: Sequence[Section]) -> str:
    """The page for a browser, with its pictures inside."""
    body = [f"<h1>{escape(title)}</h1>"]
    for section in sections:
        body += [f"<h2>{escape(section.title)}</h2>"] if section.title else []
        body += [f"<p>{escape(text)}</p>" for text in section.text]
        body += [_html_table(table) for table in section.tables]
        body += [_html_picture(path) for path in section.pictures]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return f"<!doctype html>\n<html lang=en><head>{head}</head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"


def _markdown_rows(table: Table) -> list[str]:
    clean = [[cell.replace("|", "\\|") for cell in row] for row in (table.header, *table.rows)]
    lines = ["| " + " | ".join(row) + " |" for row in clean]
    return [lines[0], "|---|" + "---:|" * (len(table.header) - 1), *lines[1:]]


def _html_table(table: Table) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.header)
    rows = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    return f"<table><thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table>"


def _html_picture(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<p><img alt="{escape(path.stem)}" src="data:image/png;base64,{data}"></p>'
