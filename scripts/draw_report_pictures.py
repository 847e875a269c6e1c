"""Draw the tour's pictures of a report: charts of its page, as PNG.

    oper report demo/plan --profile demo/profile --compare demo/compare.json -o demo/plan.html
    python scripts/draw_report_pictures.py demo/plan.html

The page has the charts as data; vl-convert draws them here as a browser does there, in the colours
of a light page.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import vl_convert

REPOSITORY = Path(__file__).resolve().parent.parent
PICTURES = {
    "report-plan.png": ("memory", "time"),
    "report-methods.png": ("comparison", "memory-curve"),
}
_FIGURE = re.compile(
    r'<figure id="([^"]*)".*?<h3[^>]*>(.*?)</h3>.*?<script type="application/json">(.*?)</script>',
    re.DOTALL,
)
_CONFIG = re.compile(r'<script type="application/json" id="config">(.*?)</script>', re.DOTALL)
_COLOUR = re.compile(r"--([a-z-]+): (#[0-9a-f]{6});")
_WIDTH, _SCALE = 460, 1.5


def main(page: str) -> None:
    text = Path(page).read_text(encoding="utf-8")
    light = text[: text.index("prefers-color-scheme")]
    colours = dict(_COLOUR.findall(light))
    figures = {key: (title, spec) for key, title, spec in _FIGURE.findall(text)}
    match = _CONFIG.search(text)
    if match is None or not {key for keys in PICTURES.values() for key in keys} <= figures.keys():
        sys.exit(f"{page}: has not all charts; make it with --profile and --compare")
    config: dict[str, Any] = json.loads(_coloured(match[1], colours)) | {"background": "white"}
    config["font"] = "DejaVu Sans, Arial, sans-serif"
    for name, keys in PICTURES.items():
        parts = [_part(*figures[key], colours) for key in keys]
        joined = {"hconcat": parts, "config": config, "spacing": 40}
        joined["resolve"] = {"scale": {"color": "independent"}}
        path = REPOSITORY / "docs" / name
        path.write_bytes(vl_convert.vegalite_to_png(joined, scale=_SCALE))
        print(f"wrote {path.relative_to(REPOSITORY)}")


def _part(title: str, spec: str, colours: dict[str, str]) -> dict[str, Any]:
    # Charts side by side lack the width that expressions in the page use.
    fixed = spec.replace("width \\u003c", f"{_WIDTH} \\u003c")
    part: dict[str, Any] = json.loads(_coloured(fixed, colours))
    part.pop("description")
    return part | {"width": _WIDTH, "title": {"text": title, "anchor": "start"}}


def _coloured(text: str, colours: dict[str, str]) -> str:
    """Return the page's CSS variables as colours."""
    return re.sub(r"var\(--([a-z-]+)\)", lambda name: colours[name[1]], text)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
