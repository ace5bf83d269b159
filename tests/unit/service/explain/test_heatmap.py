"""Heat maps: every cell has its shade and its place, every label its text and nothing but text."""

from __future__ import annotations

import dataclasses
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from service.explain.heatmap import Heatmap, draw, draw_beside, visible

SVG = "{http://www.w3.org/2000/svg}"
NASTY = ("<script>alert(1)</script>", '"><svg onload="x()">', "a&b", "]]>", "\x00\x1b\u202e", "'", "")


def parse(heatmap: Heatmap, cell: float = 20.0) -> ElementTree.Element:
    return ElementTree.fromstring(draw(heatmap, cell, alone=True))


def texts(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def shades(root: ElementTree.Element, shape: tuple[int, int]) -> np.ndarray:
    """Opacities read back from the picture's paths."""
    found = np.zeros(shape)
    for path in root.iter(f"{SVG}path"):
        if path.get("class") != "ink":
            continue
        for x, y, length in re.findall(r"M(\d+) (\d+)h(\d+)v1h-\3z", path.attrib["d"]):
            cells = found[int(y), int(x) : int(x) + int(length)]
            assert not cells.any(), "a cell is drawn twice"
            cells += float(path.attrib["fill-opacity"])
    return found


def heatmap(rows: int = 3, columns: int = 5) -> Heatmap:
    weights = np.random.default_rng(0).dirichlet(np.full(columns, 0.3), rows).astype(np.float32)
    return Heatmap([f"r{i}" for i in range(rows)], [f"c{i}" for i in range(columns)], weights, float(weights.max()))


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (40, 7)])
def test_every_cell_is_as_strong_as_its_share_of_the_largest(shape: tuple[int, int]) -> None:
    drawn = heatmap(*shape)
    found = shades(parse(drawn), shape)
    np.testing.assert_allclose(found, drawn.weights / drawn.weights.max(), atol=0.5 / 32 + 1e-3)
    assert found.max() == 1.0


def test_shares_beyond_the_strongest_are_as_strong() -> None:
    found = shades(parse(Heatmap("ab", "xy", np.array([[1.0, 0.0], [0.3, 0.4]]), 0.4)), (2, 2))
    np.testing.assert_allclose(found, [[1.0, 0.0], [0.75, 1.0]])


def test_equal_neighbours_are_one_rectangle_and_zeros_are_none() -> None:
    weights = np.array([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])
    root = parse(Heatmap("ab", "xyz", weights, 1.0))
    paths = {path.get("fill-opacity"): path.get("d") for path in root.iter(f"{SVG}path") if path.get("class") == "ink"}
    assert paths == {"0.5": "M0 0h2v1h-2z", "1": "M0 1h1v1h-1z"}


def test_a_map_of_nothing_but_zeros_is_drawn() -> None:
    assert not shades(parse(Heatmap("a", "xy", np.zeros((1, 2)), 0.0)), (1, 2)).any()


def test_labels_titles_and_axes_are_text_whatever_they_say() -> None:
    weights = np.full((len(NASTY), len(NASTY)), 1 / len(NASTY))
    root = parse(Heatmap(NASTY, NASTY, weights, 1.0, NASTY[:5], NASTY[0], NASTY[1]))
    elements = {element.tag.removeprefix(SVG) for element in root.iter()}
    assert elements == {"svg", "style", "rect", "text", "g", "path"}
    assert not [name for element in root.iter() for name in element.attrib if name.startswith("on")]
    found = texts(root)
    assert found.count(visible(NASTY[0])) == 2
    assert set(NASTY[:4]) <= set(found)
    # Characters that XML does not take, however they are written; it takes the last, which a label has no shape for.
    assert "\ufffd\ufffd\u202e" in found
    assert f"{NASTY[1]} →" in found
    assert f"← {NASTY[0]}" in found


def test_a_picture_refers_to_nothing_outside_itself() -> None:
    drawn = draw(dataclasses.replace(heatmap(), lines=("title",)), 20.0, alone=True)
    assert not re.search(r"href|src=|url\(|@import|<script|<image", drawn)
    assert re.findall(r"https?://[^\"]*", drawn) == ["http://www.w3.org/2000/svg"]


@pytest.mark.parametrize(
    ("token", "label"),
    [
        ("a", "a"),
        ("č", "č"),
        (" ", "␣"),
        ("Ġdef", "␣def"),
        ("▁der", "␣der"),
        ("\n", "↵"),
        ("", "·"),
        ("\x07", "\N{REPLACEMENT CHARACTER}"),
        ("x" * 16, "x" * 16),
        ("x" * 17, "x" * 15 + "…"),
    ],
)
def test_a_token_has_a_label_that_shows(token: str, label: str) -> None:
    assert visible(token) == label


def test_labels_too_close_to_read_are_left_out_evenly() -> None:
    drawn = heatmap(rows=100, columns=100)
    large, small = texts(parse(drawn, 16.0)), texts(parse(drawn, 3.0))
    assert large == [*drawn.columns, *drawn.rows]
    assert small == [*drawn.columns[::3], *drawn.rows[::3]]


def test_everything_lies_within_the_picture() -> None:
    labels = {"rows": ["r" * 30] * 2, "columns": ["c" * 30, "x"], "row_axis": "rows", "column_axis": "columns"}
    drawn = dataclasses.replace(heatmap(2, 2), lines=("a title longer than the map is wide",), **labels)
    root = parse(drawn)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for element in root.iter(f"{SVG}text"):
        if "x" in element.attrib:
            # Of DejaVu Sans Mono; and of Helvetica on average, in which an axis's arrow is as wide as two letters.
            width_of_one = 0.602 if element.get("class") == "token" else 0.5
            advance = width_of_one * float(element.attrib["font-size"]) * len(element.text or "")
            x = float(element.attrib["x"])
            x -= {"end": advance, "middle": advance / 2}.get(element.attrib.get("text-anchor", ""), 0.0)
            assert x >= 0
            assert x + advance <= width
            assert 0 < float(element.attrib["y"]) < height


def test_heatmaps_beside_each_other_are_whole_and_do_not_overlap() -> None:
    one, other = (
        dataclasses.replace(heatmap(2, 3), lines=("first",)),
        dataclasses.replace(heatmap(4, 2), lines=("<2>",)),
    )
    alone = [ElementTree.fromstring(draw(each, 20.0, alone=True)) for each in (one, other)]
    root = ElementTree.fromstring(draw_beside([one, other], 20.0))
    assert texts(root) == [text for each in alone for text in texts(each)]
    widths = [float(each.attrib["width"]) for each in alone]
    starts = [
        float(re.findall(r"translate\(([\d.]+) 0\)", each.attrib["transform"])[0]) for each in root.findall(f"{SVG}g")
    ]
    assert starts[0] == 0.0
    assert starts[1] >= widths[0]
    assert float(root.attrib["width"]) >= starts[1] + widths[1]
    assert float(root.attrib["height"]) == max(float(each.attrib["height"]) for each in alone)
