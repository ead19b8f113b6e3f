"""One self-contained page: sections of text, picture and table in plain HTML, without scripts or files beside it."""

import base64
from collections.abc import Sequence
import html
from typing import NamedTuple

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 60rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; line-height: 1.25; } h2 { font-size: 1.15rem; margin: 2.2rem 0 0.3rem; }
p { margin: 0.4rem 0; max-width: 46rem; overflow-wrap: break-word; } img { max-width: 100%; height: auto; }
.picture, .table { overflow-x: auto; margin: 0.6rem 0; }
table { border-collapse: collapse; font-size: 0.85rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.2rem 0.6rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
""".strip()


class Table(NamedTuple):
    """Attributes: the `header` of each column, and `rows` of as many cells."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


class Section(NamedTuple):
    """Attributes: `title`; `text`, paragraphs separated by an empty line; `picture`, a PNG's bytes; `table`."""

    title: str
    text: str
    picture: bytes | None = None
    table: Table | None = None


def page(title: str, sections: Sequence[Section]) -> str:
    """An HTML document that can be sent as one file.

    Args:
        title: of the page, and its heading.
        sections: in order; all their text is plain, and escaped here.
    """
    parts = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{html.escape(title)}</title>\n<style>\n{STYLE}\n</style>\n</head>\n<body>",
        f"<h1>{html.escape(title)}</h1>",
        *(_section(section) for section in sections),
        "</body>\n</html>\n",
    ]
    return "\n".join(parts)


def _section(section: Section) -> str:
    parts = [f"<section>\n<h2>{html.escape(section.title)}</h2>"]
    if section.picture is not None:
        data = base64.b64encode(section.picture).decode("ascii")
        alt = html.escape(section.title, quote=True)
        parts.append(f'<div class="picture"><img alt="{alt}" src="data:image/png;base64,{data}"></div>')
    parts += [f"<p>{html.escape(text.strip())}</p>" for text in section.text.split("\n\n") if text.strip()]
    if section.table is not None:
        parts.append(_table(section.table))
    return "\n".join([*parts, "</section>"])


def _table(table: Table) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "\n".join(row(cells, "td") for cells in table.rows)
    return (
        f'<div class="table"><table>\n<thead>{row(table.header, "th")}</thead>\n<tbody>\n{body}\n</tbody></table></div>'
    )
