"""Draw docs/idea.svg: rows by access frequency, and their places on four ranks.

python scripts/draw_idea.py
"""

from pathlib import Path

TARGET = Path(__file__).resolve().parents[1] / "docs" / "idea.svg"
WIDTH, HEIGHT = 900, 330
RANKS, BARS, HOT, WARM = 4, 36, 4, 16
BASE, TALLEST = 262, 180  # the lower edge of all bars, and the height of the first
LEFT, BAR = 40, 10  # the left edge of the first bar, and the distance to the next

STYLE = """
text { font: 14px system-ui, sans-serif; fill: #1f2328 } .small { font-size: 12px }
.middle { text-anchor: middle } .page { fill: #ffffff } .rank { fill: none; stroke: #8b949e }
.hot { fill: #d1495b } .warm { fill: #edae49 } .cold { fill: #6c9bc4 }
.arrow { stroke: #8b949e; stroke-width: 2; fill: none } .head { fill: #8b949e }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .page { fill: #0d1117 } }
"""


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """Return a line of text that starts at x; with class `middle` it is centred there."""
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{words}</text>'


def box(x: float, y: float, width: float, height: float, kind: str) -> str:
    """Return a filled rectangle."""
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {place} rx="1.5" class="{kind}"/>'


def kind_of(row: int) -> str:
    """Return the class of a row, given its position in order of access frequency."""
    return "hot" if row < HOT else "warm" if row < WARM else "cold"


def rows() -> list[str]:
    """Return the bars: accesses fall about as one over the position."""
    shapes = [text(LEFT, 40, "Rows of a table, by how often a log reads them")]
    for row in range(BARS):
        height = TALLEST / (1 + 0.7 * row) + 3
        shapes.append(box(LEFT + row * BAR, BASE - height, BAR - 2, height, kind_of(row)))
    for first, last, kind in ((0, HOT, "hot"), (HOT, WARM, "warm"), (WARM, BARS, "cold")):
        middle = LEFT + (first + last) / 2 * BAR
        shapes.append(text(middle, BASE + 20, kind, "middle small"))
    return shapes


def ranks() -> list[str]:
    """Return the memory of each rank: every hot row, and its share of the warm and cold rows."""
    left, width, gap = 520, 78, 12
    shapes = [text(left, 40, "Where OPER puts them")]
    for rank in range(RANKS):
        x = left + rank * (width + gap)
        shapes.append(f'<rect x="{x}" y="60" width="{width}" height="202" rx="6" class="rank"/>')
        shapes.append(text(x + width / 2, BASE + 20, f"rank {rank}", "middle small"))
        for top, count, kind in (
            (72, HOT, "hot"),
            (132, (WARM - HOT) // RANKS, "warm"),
            (179, (BARS - WARM) // RANKS, "cold"),
        ):
            shapes += [box(x + 9, top + 13 * n, width - 18, 10, kind) for n in range(count)]
    return shapes


def main() -> None:
    """Write the picture."""
    title = "Hot rows are replicated, warm rows are placed one by one, cold rows are spread"
    legend = []
    for x, kind, words in (
        (LEFT, "hot", "hot: a copy on every rank"),
        (LEFT + 250, "warm", "warm: one owner each, chosen to balance the ranks"),
        (LEFT + 600, "cold", "cold: spread evenly over the ranks"),
    ):
        legend += [box(x, 300, 12, 12, kind), text(x + 18, 311, words, "small")]
    arrow = [
        '<path class="arrow" d="M430 165 H485"/>',
        '<path class="head" d="M498 165 l-14 -7 v14 z"/>',
    ]
    shapes = [*rows(), *arrow, *ranks(), *legend]
    TARGET.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n"
        f'<rect width="{WIDTH}" height="{HEIGHT}" class="page"/>\n'
        + "\n".join(shapes)
        + "\n</svg>\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
