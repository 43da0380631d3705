"""Drawings: well-formed, complete, and nothing hidden without saying so."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from circuitlab.circuit import Circuit
from circuitlab.draw import Drawing, circuit_svg
from circuitlab.errors import ArgumentError
from circuitlab.sites import ModelShape
from circuitlab.tables import EdgeTable, ModelInfo, Run, edge_rows

EMBEDDED = ModelShape(3, 4, 4, 96, 24, 155)
GPT2 = ModelShape(12, 12, 12, 768, 64, 50257)
SMOL = ModelShape(30, 9, 3, 576, 64, 49152)
JOINED = ModelShape(2, 2, 2, 8, 4, 50, parallel=True, split_heads=False)
SHAPES = [EMBEDDED, GPT2, SMOL, JOINED]
SPACE = "{http://www.w3.org/2000/svg}"


def table_of(shape: ModelShape, dataset: str = "ioi") -> EdgeTable:
    info = ModelInfo("toy & co", "gpt2", "w", "float32", "none", shape)
    metric = {"name": "m", "higher_is_better": True}
    run = Run("edge", info, dataset, "digest", 8, {"method": "eap", "metric": metric})
    scores = np.random.default_rng(0).normal(size=shape.n_edges)
    scores[:3] = [np.inf, np.nan, 0.0]
    return EdgeTable(edge_rows(shape, scores, None, 8), run)


def lines(svg: str) -> dict[str, ElementTree.Element]:
    """Drawn edges by name."""
    root = ElementTree.fromstring(svg)
    found = {}
    for path in root.iter(f"{SPACE}path"):
        title = path.find(f"{SPACE}title")
        assert title is not None
        assert title.text is not None
        found[title.text.split("  score ")[0]] = path
    return found


@st.composite
def circuits(draw) -> Circuit:
    shape = draw(st.sampled_from(SHAPES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = draw(st.integers(0, 80))
    places = rng.choice(shape.n_edges, min(size, shape.n_edges), replace=False)
    edges = frozenset(shape.edge_names[i] for i in places)
    return Circuit(edges, draw(st.sampled_from([shape, None])), name=draw(st.text()))


@settings(max_examples=40, deadline=None)
@given(circuits())
def test_every_edge_and_component_is_drawn_on_the_page(circuit):
    svg = circuit_svg(circuit)
    root = ElementTree.fromstring(svg)
    assert set(lines(svg)) == circuit.edges
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for path in lines(svg).values():
        numbers = [float(n) for n in re.findall(r"-?\d+\.\d", path.attrib["d"])]
        for x, y in zip(numbers[::2], numbers[1::2]):
            assert -20 <= x <= width + 20
            assert -60 <= y <= height
    assert "nan" not in svg.lower().replace(circuit.name.lower(), "")


@pytest.mark.parametrize("shape", SHAPES)
def test_lines_run_from_left_to_right(shape):
    table = table_of(shape)
    for path in lines(circuit_svg(table, max_edges=400)).values():
        numbers = [float(n) for n in re.findall(r"-?\d+\.\d", path.attrib["d"])]
        assert numbers[0] < numbers[-2]


def test_colour_is_the_sign_of_support_and_width_its_size():
    edges = ["input->m0", "m0->m1", "m1->logits"]
    circuit = Circuit.from_edges(edges, EMBEDDED)
    drawn = lines(circuit_svg(circuit, {"input->m0": 2.0, "m0->m1": -0.5}))
    strokes = [drawn[name].attrib["stroke"] for name in edges]
    assert len(set(strokes)) == 3
    widths = [float(drawn[name].attrib["stroke-width"]) for name in edges]
    assert widths[0] > widths[1] > widths[2]


def test_a_table_of_scores_draws_supports():
    table = table_of(EMBEDDED)
    circuit = Circuit(frozenset(EMBEDDED.edge_names[10:14]), EMBEDDED)
    by_table = lines(circuit_svg(circuit, table))
    supports = dict(zip(EMBEDDED.edge_names, table.support.tolist()))
    by_number = lines(circuit_svg(circuit, supports))
    for name in circuit.edges:
        assert by_table[name].attrib["stroke"] == by_number[name].attrib["stroke"]


def test_ports_differ_without_colour():
    edges = [f"input->a1.h1<{port}>" for port in "qkv"]
    svg = circuit_svg(Circuit.from_edges([*edges, "a1.h1->logits"], EMBEDDED))
    drawn = lines(svg)
    assert len({drawn[name].attrib.get("stroke-dasharray") for name in edges}) == 3
    assert len({drawn[name].attrib["d"] for name in edges}) == 3
    texts = [node.text for node in ElementTree.fromstring(svg).iter(f"{SPACE}text")]
    assert {"q", "k", "v", "query", "key", "value"} <= set(texts)


def test_the_cap_is_stated_and_keeps_the_strongest():
    table = table_of(GPT2)
    svg = circuit_svg(table)
    drawn = lines(svg)
    assert len(drawn) == 1500
    assert f"1,500 of {GPT2.n_edges - 1:,} edges drawn" in svg
    sizes = dict(zip(GPT2.edge_names, np.abs(table.scores)))
    weakest = min(sizes[name] for name in drawn)
    left_out = [s for name, s in sizes.items() if name not in drawn and not np.isnan(s)]
    assert weakest >= max(left_out)


@given(st.text(max_size=30))
@settings(max_examples=40, deadline=None)
def test_titles_are_escaped(title):
    title = f'<script>alert("&")</script>{title}\x00\x1b'
    svg = circuit_svg(Circuit.from_edges(["input->m0"], EMBEDDED), title=title)
    root = ElementTree.fromstring(svg)
    assert not list(root.iter(f"{SPACE}script"))
    assert "<script" not in svg


def test_a_drawing_has_no_outside_references():
    svg = circuit_svg(table_of(SMOL), max_edges=200)
    assert "href" not in svg
    assert "url(" not in svg
    assert svg.count("http") == 1


def test_a_group_is_one_bar_beside_its_heads():
    edges = ["input->a3.kv1<k>", "input->a3.kv1<v>", "a3.h4->logits"]
    svg = circuit_svg(Circuit.from_edges(edges, SMOL), background=None)
    assert svg.count('fill="#aab6c5"') == 1


def test_the_same_circuit_gives_the_same_text():
    edges = [f"a0.h{head}->logits" for head in range(4)]
    first = circuit_svg(Circuit.from_edges(edges, EMBEDDED))
    assert first == circuit_svg(Circuit.from_edges(edges[::-1], EMBEDDED))


def test_a_drawing_is_saved(tmp_path):
    drawing = Circuit.from_edges(["input->m0"], EMBEDDED).plot(title="m")
    assert isinstance(drawing, Drawing)
    path = drawing.save(tmp_path / "circuit.svg")
    assert path.read_text(encoding="utf-8") == str(drawing) == drawing._repr_html_()


@pytest.mark.parametrize("cap", [0, -3, True])
def test_a_senseless_cap_is_refused(cap):
    with pytest.raises(ArgumentError) as refused:
        circuit_svg(Circuit.from_edges([]), max_edges=cap)
    assert refused.value.code == "max_edges_invalid"
