"""The picture in docs/architecture.md: made from today's imports, and nothing left out of it."""

import xml.etree.ElementTree as ElementTree

from scripts import draw_architecture
from tests.project.test_architecture import FLOOR


def test_committed_picture_is_the_one_the_script_makes_now() -> None:
    committed = draw_architecture.PICTURE.read_text(encoding="utf-8")
    assert committed == draw_architecture.picture(), (
        "the imports have changed: run python scripts/draw_architecture.py, and look at the picture"
    )


def test_every_package_has_a_box_and_every_import_a_path_of_arrows() -> None:
    graph = draw_architecture.package_imports()
    texts = ElementTree.fromstring(draw_architecture.picture()).iter(
        "{http://www.w3.org/2000/svg}text"
    )
    assert {text.text for text in texts} == set(graph) == set(FLOOR)

    drawn = draw_architecture.without_implied(graph)

    def reached(name: str) -> set[str]:
        return drawn[name].union(*(reached(target) for target in drawn[name]))

    missing = {(name, target) for name in graph for target in graph[name] - reached(name)}
    assert not missing


def test_all_arrows_lead_down() -> None:
    graph = draw_architecture.package_imports()
    level = draw_architecture.levels(draw_architecture.without_implied(graph))
    assert all(level[name] > level[target] for name in graph for target in graph[name])
