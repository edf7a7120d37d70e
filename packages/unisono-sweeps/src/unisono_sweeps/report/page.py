"""The HTML of a report: every text from a run is escaped, and no script runs but the one of this package.

The page forbids everything else by its content security policy, which names that script by its hash; a chart's numbers
are JSON that is no script to a browser.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.runtime.console import clean

_HERE = Path(__file__).parent
_COLOURS = ("#3b7dd8", "#d9662b", "#2f9e63", "#b04fc4", "#c9a227", "#d1495b", "#3aa6b9", "#7d7d7d")
_MOST_NAMED = 24  # entries of a legend


@dataclass(frozen=True)
class Curve:
    """A line, or points, of a chart.

    Attributes:
        name: of the line.
        x: of its points.
        y: of its points; None is a gap.
        names: of the points, if they are not joined.
        group: of lines that belong together, as runs that differ in their seed do: they share a colour and a place in
            the legend. Empty: the line stands for itself.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    names: Sequence[str] = ()
    group: str = ""


@dataclass(frozen=True)
class Chart:
    """A chart.

    Attributes:
        title: above it.
        curves: in it.
        xlabel: under it.
        points: whether to draw points instead of lines.
        logx: whether the x axis begins as a logarithmic one.
        logy: the same for y.
    """

    title: str
    curves: Sequence[Curve]
    xlabel: str = "step"
    points: bool = False
    logx: bool = False
    logy: bool = False


@dataclass
class Page:
    """A page under construction; its methods take texts, never markup."""

    title: str
    _parts: list[str] = field(default_factory=list)
    _section: str = ""

    def heading(self, text: str) -> None:
        """Begin a section."""
        self._section = text
        self._parts.append(f"<h2>{escape(text)}</h2>")

    def paragraph(self, text: str, kind: str = "") -> None:
        """Add a paragraph."""
        self._parts.append(f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>")

    def code(self, text: str) -> None:
        """Add a command or other text as it is."""
        self._parts.append(f"<pre>{escape(text)}</pre>")

    def facts(self, values: Mapping[str, object]) -> None:
        """Add names and values."""
        rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in values.items())
        self._parts.append(f"<dl>{rows}</dl>")

    def table(self, head: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> None:
        """Add a table; cells after the first `texts` columns are numbers."""

        def line(cells: Sequence[str], tag: str, scope: str = "") -> str:
            kinds = ["" if number < texts else ' class="number"' for number in range(len(cells))]
            return "".join(
                f"<{tag}{scope}{kind}>{escape(cell)}</{tag}>" for cell, kind in zip(cells, kinds, strict=True)
            )

        body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
        top = line(head, "th", ' scope="col"')
        self._parts.append(
            f'<div class="wide" tabindex="0" role="region" aria-label="{escape(self._section)}"><table>'
            f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
        )

    def charts(self, charts: Sequence[Chart]) -> None:
        """Add charts, side by side where there is room."""
        self._parts.append(f'<div class="charts">{"".join(map(_chart, charts))}</div>')

    def details(self, summary: str, text: str) -> None:
        """Add a long text that is folded away."""
        self._parts.append(f"<details><summary>{escape(summary)}</summary><pre>{escape(text)}</pre></details>")

    def media(self, files: Iterable[tuple[str, str, bytes]]) -> None:
        """Add pictures and sounds: name, MIME type and content of each."""
        shown = []
        for name, kind, content in files:
            source = f"data:{kind};base64,{base64.b64encode(content).decode()}"
            label = escape(name)
            tag = f'<img src="{source}" alt="{label}">'
            if kind.startswith("audio/"):
                tag = f'<audio controls src="{source}" aria-label="{label}"></audio>'
            shown.append(f"<figure>{tag}<figcaption>{label}</figcaption></figure>")
        self._parts.append(f'<div class="media">{"".join(shown)}</div>')

    def render(self, *, refresh: int | None = None) -> str:
        """The whole file; with `refresh`, a browser asks for it again after so many seconds."""
        script = (_HERE / "page.js").read_text(encoding="utf-8")
        style = (_HERE / "page.css").read_text(encoding="utf-8")
        policy = (
            f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
            "media-src data:; base-uri 'none'; form-action 'none'"
        )
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            + (f'<meta http-equiv="refresh" content="{refresh}">' if refresh else "")
            + f"<title>{escape(self.title)}</title><style>{style}</style></head>\n"
            f"<body><main><h1>{escape(self.title)}</h1>\n" + "\n".join(self._parts) + f"\n</main>"
            f"<script>{script}</script></body></html>\n"
        )


def escape(text: object) -> str:
    """A text for HTML: never markup, without secrets or control characters."""
    return html.escape(clean(text), quote=True)


def embed_json(value: Any) -> str:
    """JSON that ends no element of a page, whatever is in it."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _chart(chart: Chart) -> str:
    groups = list(dict.fromkeys(one.group or one.name for one in chart.curves))
    colours = {group: number % len(_COLOURS) for number, group in enumerate(groups)}
    data = {
        "title": clean(chart.title), "xlabel": chart.xlabel, "points": chart.points, "logx": chart.logx,
        "logy": chart.logy,
        "series": [
            {
                "name": clean(one.name), "x": list(one.x), "y": list(one.y), "names": [clean(n) for n in one.names],
                "colour": _COLOURS[colours[one.group or one.name]],
            }
            for one in chart.curves
        ],
    }  # fmt: skip
    described = f"{chart.title}: " + "; ".join(_describe(one) for one in chart.curves[:8])
    legend = ""
    if len(chart.curves) > 1:
        items = [f"<li>{_swatch(_COLOURS[colours[group]])}{escape(group)}</li>" for group in groups[:_MOST_NAMED]]
        if len(groups) > _MOST_NAMED:
            items.append(f"<li>and {len(groups) - _MOST_NAMED} more</li>")
        legend = f'<ul class="legend">{"".join(items)}</ul>'
    return (
        f'<figure class="chart"><h3>{escape(chart.title)}</h3>'
        f'<svg viewBox="0 0 560 300" role="img" tabindex="0" aria-label="{escape(described)}"></svg>'
        f'<output aria-live="polite"></output>{legend}<p class="tools" hidden>'
        '<button type="button" data-log="x" aria-pressed="false">log x</button>'
        '<button type="button" data-log="y" aria-pressed="false">log y</button>'
        '<button type="button">whole</button></p>'
        '<details class="values" hidden><summary>values as a table</summary></details>'
        f'<script type="application/json">{embed_json(data)}</script></figure>'
    )


def _swatch(colour: str) -> str:
    """A sample of a curve's colour, which the style sheet cannot know."""
    return (
        f'<svg width="18" height="8" viewBox="0 0 18 8" aria-hidden="true"><rect width="18" height="4" y="2" '
        f'fill="{colour}"/></svg> '
    )


def _describe(curve: Curve) -> str:
    """A curve in words, for who does not see it."""
    known = [(x, y) for x, y in zip(curve.x, curve.y, strict=True) if y is not None]
    if not known:
        return f"{curve.name} has no values"
    (x0, y0), (x1, y1) = known[0], known[-1]
    low, high = min(y for _, y in known), max(y for _, y in known)
    return f"{curve.name} from {y0:.4g} at {x0:g} to {y1:.4g} at {x1:g}, between {low:.4g} and {high:.4g}"


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
