"""Draw docs/architecture.svg: the packages of `oper` and their imports.

    python scripts/draw_architecture.py

A box is a package, an arrow an import by any of its modules. An arrow that others imply is left
out: if a imports b, and b imports c, no arrow is drawn from a to c. Boxes lie in levels, each just
below its lowest importer; in a level they are ordered by the mean position of their neighbours
(Sugiyama, Tagawa and Toda 1981), long arrows taking a place in every level that they cross.

Equal imports give equal bytes: tests/project/test_picture.py compares them with the committed file.
"""

import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PICTURE = REPOSITORY / "docs" / "architecture.svg"

Graph = dict[str, set[str]]

BOX_HEIGHT, LEVEL_HEIGHT, GAP, MARGIN = 30, 72, 22, 24
LETTER_WIDTH, PADDING = 7.4, 22
PASSING_WIDTH = 8.0  # width of a long arrow on a level that it crosses
ROUNDS = 60  # of ordering and of placing; both have settled after fewer

# Hues of top-level packages, equal for those of one stage; others are grey.
HUES = {
    "logs": 150,
    "profiling": 150,
    "synth": 150,
    "planner": 215,
    "plan": 45,
    "checker": 45,
    "cost": 45,
    "runtime": 0,
    "torchrec": 285,
    "measure": 0,
}

STYLE = """\
text { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #1f2328;
       text-anchor: middle }
.page { fill: #ffffff } .box { stroke-width: 1.2 } .arrow { fill: none; stroke: #8b949e }
.head { fill: #8b949e }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .page { fill: #0d1117 }
  .arrow { stroke: #6e7681 } .head { fill: #6e7681 }
"""


def package_imports() -> Graph:
    """Return the packages that each package imports, except itself; names are those below
    `oper`."""
    sys.path.insert(0, str(REPOSITORY))  # as a script, of this checkout and no other
    from tests.project.test_architecture import imports, package

    graph: Graph = {}
    for module, targets in imports().items():
        importer = package(module)
        graph.setdefault(importer, set()).update(map(package, targets))
    return {name: graph[name] - {name} for name in sorted(graph) if graph[name] or name == "base"}


def without_implied(graph: Graph) -> Graph:
    """Return the graph, which has no circles, without the arrows that paths of others imply."""

    def below(name: str) -> set[str]:
        return graph[name].union(*(below(target) for target in graph[name]))

    return {
        name: targets - set().union(*(below(target) for target in targets))
        for name, targets in graph.items()
    }


def levels(graph: Graph) -> dict[str, int]:
    """Return the level of each package, 0 at the bottom; a package is just below its lowest
    importer."""

    def height(name: str) -> int:
        return 1 + max(map(height, graph[name]), default=-1)

    top = max(map(height, graph))
    importers = {name: [a for a in graph if name in graph[a]] for name in graph}

    def level(name: str) -> int:
        return min((level(a) - 1 for a in importers[name]), default=top)

    return {name: level(name) for name in graph}


class Drawing:
    """Places of the boxes of a graph; `paths` are the arrows, level by level downwards."""

    def __init__(self, graph: Graph) -> None:
        self.level = levels(graph)
        self.rows: list[list[str]] = [[] for _ in range(1 + max(self.level.values()))]
        for name in graph:
            self.rows[self.level[name]].append(name)
        self.paths: list[list[str]] = []
        for name, targets in graph.items():
            for target in sorted(targets):
                crossed = range(self.level[name] - 1, self.level[target], -1)
                between = [f"{name} > {target} {number}" for number in crossed]
                for number, passing in zip(crossed, between, strict=True):
                    self.rows[number].append(passing)
                self.paths.append([name, *between, target])
        self.neighbours: dict[str, list[str]] = defaultdict(list)
        for path in self.paths:
            for upper, lower in pairwise(path):
                self.neighbours[upper].append(lower)
                self.neighbours[lower].append(upper)
        self.boxes = set(graph)
        self.x: dict[str, float] = {}
        for row in self.rows:
            self._place(row, {name: 100.0 * number for number, name in enumerate(row)})
        for reorder in (True, False):
            for sweep in range(ROUNDS):
                for row in self.rows if sweep % 2 else self.rows[::-1]:
                    wanted = {name: self._mean(name) for name in row}
                    if reorder:
                        row.sort(key=lambda name: (wanted[name], name))
                    self._place(row, wanted)
        left = min(self.x[name] - self.width(name) / 2 for name in self.x)
        self.x = {name: x - left + MARGIN for name, x in self.x.items()}

    def width(self, name: str) -> float:
        if name not in self.boxes:
            return PASSING_WIDTH
        return len(name) * LETTER_WIDTH + PADDING

    def _mean(self, name: str) -> float:
        """Return the mean position of the neighbours."""
        around = self.neighbours[name] or [name]
        return sum(self.x[other] for other in around) / len(around)

    def _place(self, row: list[str], wanted: dict[str, float]) -> None:
        """Give a level its positions: in its order, without overlaps, as near as possible to the
        wanted ones (least squares; boxes that touch are moved as one)."""
        offset: list[float] = []
        at = 0.0
        for before, name in zip([row[0], *row], row, strict=False):
            if offset:
                at += (self.width(before) + self.width(name)) / 2 + GAP
            offset.append(at)
        touching: list[tuple[float, int]] = []  # mean shift, boxes
        for name, at in zip(row, offset, strict=True):
            shift, boxes = wanted[name] - at, 1
            while touching and touching[-1][0] > shift:
                other, more = touching.pop()
                shift = (shift * boxes + other * more) / (boxes + more)
                boxes += more
            touching.append((shift, boxes))
        shifts = [shift for shift, boxes in touching for _ in range(boxes)]
        for name, at, shift in zip(row, offset, shifts, strict=True):
            self.x[name] = at + shift

    def y(self, level: int) -> int:
        """Return the middle of a level."""
        return MARGIN + BOX_HEIGHT // 2 + (len(self.rows) - 1 - level) * LEVEL_HEIGHT

    def arrow(self, path: list[str]) -> str:
        """Return a smooth line from the bottom of a box to the top of another."""
        top = self.level[path[0]]
        points = [(self.x[name], self.y(top - number)) for number, name in enumerate(path)]
        points[0] = (points[0][0], points[0][1] + BOX_HEIGHT // 2)
        points[-1] = (points[-1][0], points[-1][1] - BOX_HEIGHT // 2 - 6)
        steps = [f"M{points[0][0]:.0f} {points[0][1]}"]
        for (x0, y0), (x1, y1) in pairwise(points):
            middle = (y0 + y1) // 2
            steps.append(f"C{x0:.0f} {middle} {x1:.0f} {middle} {x1:.0f} {y1}")
        return f'<path class="arrow" d="{" ".join(steps)}" marker-end="url(#head)"/>'

    def box(self, name: str) -> str:
        width, x, y = self.width(name), self.x[name], self.y(self.level[name])
        place = f'x="{x - width / 2:.0f}" y="{y - BOX_HEIGHT // 2}" width="{width:.0f}"'
        kind = name.partition(".")[0]
        return (
            f'<rect class="box {kind if kind in HUES else "other"}" {place} '
            f'height="{BOX_HEIGHT}" rx="5"/><text x="{x:.0f}" y="{y + 5}">{name}</text>'
        )

    @property
    def size(self) -> tuple[int, int]:
        right = max(self.x[name] + self.width(name) / 2 for name in self.x)
        return round(right) + MARGIN, self.y(0) + BOX_HEIGHT // 2 + MARGIN


def picture() -> str:
    """Return the whole SVG."""
    drawing = Drawing(without_implied(package_imports()))
    width, height = drawing.size
    light = [
        f".{kind} {{ fill: hsl({h},70%,93%); stroke: hsl({h},45%,55%) }}"
        for kind, h in HUES.items()
    ]
    dark = [
        f"  .{kind} {{ fill: hsl({h},35%,20%); stroke: hsl({h},40%,50%) }}"
        for kind, h in HUES.items()
    ]
    light.append(".other { fill: #f3f4f6; stroke: #8b949e }")
    dark.append("  .other { fill: #21262d; stroke: #6e7681 }")
    before, dark_rules = STYLE.split("@media", 1)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">',
        "<title>Packages of oper: each imports only what is below it</title>",
        f"<style>\n{before}" + "\n".join(light) + f"\n@media{dark_rules}" + "\n".join(dark),
        "}\n</style>",
        '<marker id="head" viewBox="0 0 8 8" refX="2" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path class="head" d="M0 0L8 4L0 8z"/></marker>',
        f'<rect class="page" width="{width}" height="{height}"/>',
        *map(drawing.arrow, drawing.paths),
        *map(drawing.box, sorted(drawing.boxes)),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
    print(f"wrote {PICTURE.relative_to(REPOSITORY)}")
