"""Selectors: one meaning in SQL, as a mask and as text."""

from __future__ import annotations

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from circuitlab.errors import ArgumentError
from circuitlab.patterns import FORMS, KINDS, QUANTITIES, Bound, EdgePattern, End, Span
from circuitlab.select import (
    EdgeSelector,
    SiteSelector,
    matching_sites,
    parse_edge_selector,
    parse_site_selector,
    site_facts,
)
from circuitlab.sites import ModelShape, parse_edge
from circuitlab.tables import EDGE, STATUSES, EdgeTable, ModelInfo, Run, edge_rows

MULTI_HEAD = ModelShape(3, 2, 2, 8, 4, 50)
GROUPED = ModelShape(3, 4, 2, 8, 2, 50)
JOINED = ModelShape(2, 2, 2, 8, 4, 50, parallel=True, split_heads=False)
SHAPES = [MULTI_HEAD, GROUPED, JOINED]


def run_of(shape: ModelShape, *, higher_is_better: bool = True) -> Run:
    info = ModelInfo("toy", "gpt2", "", "float32", "none", shape)
    metric = {"name": "m", "higher_is_better": higher_is_better}
    return Run("edge", info, "data", "digest", 4, {"method": "eap", "metric": metric})


def table_of(shape: ModelShape, **columns: object) -> EdgeTable:
    rows = edge_rows(shape, np.linspace(-1, 1, shape.n_edges), None, 4)
    for name, values in columns.items():
        place = rows.schema.get_field_index(name)
        rows = rows.set_column(
            place, EDGE.field(name), pa.array(values, EDGE.field(name).type)
        )
    return EdgeTable(rows, run_of(shape))


def chosen(table: EdgeTable, text: str) -> list[str]:
    mask = parse_edge_selector(text).mask(table)
    return [e for e, kept in zip(table.rows["edge"].to_pylist(), mask) if kept]


# --- strategies -----------------------------------------------------------------

small = st.integers(-2, 1)
edge_number = st.one_of(st.none(), st.integers(-5, 5))
spans = st.builds(Span, edge_number, edge_number, st.sampled_from([None, 1, 2, -1, 3]))
number_lists = st.lists(st.one_of(small, spans), max_size=3).map(tuple)
numbers = st.one_of(st.none(), number_lists)
pattern_numbers = st.one_of(
    st.none(), st.lists(st.one_of(small, spans), min_size=1, max_size=3).map(tuple)
)
port_sets = st.one_of(
    st.none(), st.sets(st.sampled_from("qkv"), min_size=1).map(frozenset)
)


@st.composite
def ends(draw, receiver: bool = True) -> End:
    form = draw(st.sampled_from(FORMS))
    layers = heads = ports = None
    if form not in ("*", "input", "logits"):
        layers = draw(pattern_numbers)
    if form in ("head", "kv"):
        heads = draw(pattern_numbers)
    if receiver and form in ("*", "a*", "attention", "head", "kv"):
        ports = draw(port_sets)
    return End(form, layers, heads, ports)


patterns = st.builds(EdgePattern, ends(receiver=False), ends()).filter(
    lambda pattern: not pattern.explicit
)
values = st.one_of(
    st.floats(allow_nan=False), st.sampled_from([0.0, -0.5, 0.5, 1.0, 3.0])
)
bounds = st.builds(
    Bound,
    st.sampled_from(QUANTITIES),
    st.sampled_from([">", ">=", "<", "<=", "=", "!="]),
    values,
)


def words(allowed):
    return st.one_of(st.none(), st.sets(st.sampled_from(allowed)).map(frozenset))


def selectors(shape: ModelShape, depth: int = 1):
    names = st.one_of(st.none(), st.lists(patterns, max_size=3).map(tuple))
    inner = (
        st.just(())
        if not depth
        else st.lists(selectors(shape, 0), max_size=2).map(tuple)
    )
    return st.builds(
        EdgeSelector,
        names=names,
        sender_kinds=words(KINDS),
        sender_layers=numbers,
        sender_heads=numbers,
        receiver_kinds=words(KINDS),
        receiver_layers=numbers,
        receiver_heads=numbers,
        ports=words(("q", "k", "v", "in")),
        positions=numbers,
        statuses=words(STATUSES),
        sign=st.sampled_from([None, "positive", "negative"]),
        bounds=st.lists(bounds, max_size=2).map(tuple),
        exclude=inner,
        pinned=st.sets(st.sampled_from(shape.edge_names), max_size=2).map(frozenset),
    )


@st.composite
def tables(draw, shape: ModelShape) -> EdgeTable:
    n = shape.n_edges
    score = st.one_of(
        st.none(), st.sampled_from([0.0, -0.0, 0.5, -0.5, np.nan, np.inf, -np.inf])
    )
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    pool = [draw(score) for _ in range(6)]
    return table_of(
        shape,
        score=[pool[i] for i in rng.integers(0, 6, n)],
        stderr=[pool[i] for i in rng.integers(0, 6, n)],
        n=rng.integers(0, 5, n).tolist(),
        status=[STATUSES[i] for i in rng.integers(0, len(STATUSES), n)],
        position=[None if p < 0 else int(p) for p in rng.integers(-1, 4, n)],
    )


@st.composite
def cases(draw) -> tuple[EdgeSelector, EdgeTable]:
    shape = draw(st.sampled_from(SHAPES))
    return draw(selectors(shape)), draw(tables(shape))


# --- properties ------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(cases())
def test_sql_and_mask_select_the_same_rows(case):
    selector, table = case
    clause, parameters = selector.to_sql(table.shape, n_positions=4)
    rows = table.rows.append_column("place", pa.array(range(len(table))))
    with duckdb.connect() as base:
        base.register("v_edge", rows)
        query = f"select place from v_edge where {clause} order by place"
        found = [place for (place,) in base.execute(query, parameters).fetchall()]
    assert found == np.flatnonzero(selector.mask(table, n_positions=4)).tolist()


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(SHAPES).flatmap(selectors))
def test_text_reads_back_as_the_same_selector(selector):
    text = str(selector)
    assert parse_edge_selector(text) == selector
    assert str(parse_edge_selector(text)) == text


@settings(max_examples=60, deadline=None)
@given(cases())
def test_every_field_narrows_and_excludes_win(case):
    selector, table = case
    mask = selector.mask(table, n_positions=4)
    pinned = np.isin(table.rows["edge"].to_pylist(), sorted(selector.pinned))
    for other in selector.exclude:
        assert not (mask & other.mask(table, n_positions=4) & ~pinned).any()
    assert mask[pinned].all()
    wider = EdgeSelector(sign=selector.sign, pinned=selector.pinned)
    assert (mask <= wider.mask(table)).all()


@settings(max_examples=60, deadline=None)
@given(spans, st.integers(1, 6))
def test_layer_ranges_mean_what_python_slices_mean(span, n_layers):
    shape = ModelShape(n_layers, 1, 1, 4, 4, 10)
    selector = EdgeSelector(receiver_layers=(span,))
    edges = selector.preview(shape).edges
    layers = {parse_edge(edge).receiver.component.layer for edge in edges}
    assert layers == set(range(n_layers)[slice(span.start, span.stop, span.step)])


# --- meaning ---------------------------------------------------------------------


def test_the_example_of_the_documentation():
    shape = ModelShape(12, 2, 2, 8, 4, 50)
    table = table_of(shape)
    found = chosen(table, "a5-9.*<q> & |score|>0.01")
    scores = dict(zip(table.rows["edge"].to_pylist(), table.scores))
    assert found
    for edge in table.rows["edge"].to_pylist():
        receiver = parse_edge(edge).receiver
        wanted = (
            receiver.port == "q"
            and 5 <= (receiver.component.layer or 0) <= 9
            and abs(scores[edge]) > 0.01
        )
        assert (edge in found) == wanted


@pytest.mark.parametrize("text", ["", "*", "  ", "*->*"])
def test_the_empty_selector_is_every_candidate_and_says_so(text):
    selector = parse_edge_selector(text)
    assert selector.is_empty
    assert str(selector) == "*"
    assert selector.mask(table_of(MULTI_HEAD)).all()


@pytest.mark.parametrize(
    "selector",
    [
        EdgeSelector(names=()),
        EdgeSelector(receiver_layers=()),
        EdgeSelector(sender_kinds=frozenset()),
        EdgeSelector(statuses=frozenset()),
        EdgeSelector(receiver_layers=(Span(7, 9),)),
        parse_edge_selector("score>2"),
        parse_edge_selector("none"),
    ],
)
def test_what_matches_nothing_gives_nothing(selector):
    assert not selector.is_empty
    assert not selector.mask(table_of(MULTI_HEAD)).any()


def test_fields_are_and_values_are_or():
    table = table_of(MULTI_HEAD)
    both = chosen(table, "sender.kind=mlp,input & receiver.layer=2 & port=q,v")
    assert both == [
        edge
        for edge in MULTI_HEAD.edge_names
        if edge.startswith(("m", "input"))
        and "->a2." in edge
        and edge.endswith(("<q>", "<v>"))
    ]


def test_an_exclude_wins_and_a_pin_stays():
    table = table_of(MULTI_HEAD)
    assert "m0->m1" not in chosen(table, "m1, m2 & !m0->*")
    assert "m0->m1" in chosen(table, "m1, m2 & !m0->* & pin=m0->m1")


def test_an_impossible_explicit_edge_is_an_error_and_a_pattern_is_counted():
    for text in ("m2->m1", "m0->a1.kv0<k>", "pin=m2->m1"):
        with pytest.raises(ArgumentError) as refused:
            parse_edge_selector(text).mask(table_of(MULTI_HEAD))
        assert refused.value.code == "edge_unknown"
    preview = parse_edge_selector("m*->m*").preview(MULTI_HEAD)
    assert preview.edges == ("m0->m1", "m0->m2", "m1->m2")
    assert preview.impossible == 6


@pytest.mark.parametrize("text", ["m7", "a0.h9<q>", "layer=3", "sender.layer=-4"])
def test_a_number_that_does_not_exist_is_refused(text):
    with pytest.raises(ArgumentError) as refused:
        parse_edge_selector(text).mask(table_of(MULTI_HEAD))
    assert refused.value.code == "selector_out_of_range"


def test_support_turns_with_the_metric():
    rows = table_of(MULTI_HEAD).rows
    for better in (True, False):
        table = EdgeTable(rows, run_of(MULTI_HEAD, higher_is_better=better))
        mask = parse_edge_selector("support>0").mask(table)
        assert (mask == (table.support > 0)).all()


def test_negative_positions_need_the_length():
    table = table_of(MULTI_HEAD)
    with pytest.raises(ArgumentError) as refused:
        parse_edge_selector("position=-1").mask(table)
    assert refused.value.code == "positions_unresolved"


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("a5-9.*<q> & |scor|>0.01", 12),
        ("m3 &", 4),
        ("m3 m4", 3),
        ("score>abc", 6),
        ("a5.x", 2),
        ("(m3)", 0),
    ],
)
def test_a_syntax_error_marks_the_place(text, position):
    with pytest.raises(ArgumentError) as refused:
        parse_edge_selector(text)
    assert refused.value.code == "selector_syntax"
    assert refused.value.fields["position"] == position
    lines = str(refused.value).splitlines()
    assert lines[2].index("^") == lines[1].index(text) + position
    assert refused.value.fields["expected"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: EdgeSelector(sender_kinds={"heads"}),  # type: ignore[arg-type]
        lambda: EdgeSelector(sign="up"),
        lambda: EdgeSelector(receiver_layers=(True,)),
        lambda: Bound("score", ">", float("nan")),
        lambda: Bound("weight", ">", 1.0),
        lambda: EdgePattern(End("head", ports=frozenset("q")), End()),
        lambda: Span(0, 3, 0),
        lambda: parse_edge_selector("pin=m*"),
        lambda: parse_edge_selector("status=fine"),
    ],
)
def test_a_field_outside_its_vocabulary_is_refused(make):
    with pytest.raises(ArgumentError) as refused:
        make()
    assert refused.value.code == "selector_invalid"


def test_a_field_given_twice_is_refused():
    with pytest.raises(ArgumentError, match="twice"):
        parse_edge_selector("layer=3 & layer=4")


# --- sites -----------------------------------------------------------------------

SITES = [
    "embed.hook_out",
    "blocks.0.attn.o.hook_in",
    "blocks.0.mlp.hook_out",
    "blocks.1.attn.o.hook_in",
    "blocks.1.hook_out",
]


def site_rows() -> pa.Table:
    return pa.table(
        {
            "site": SITES,
            "position": pa.array([0, 1, 2, 3, None], pa.int32()),
            "score": pa.array([0.5, -1.0, None, 2.0, float("nan")]),
            "status": ["ok", "ok", "unreachable", "ok", "ok"],
        }
    )


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("*.hook_out", [0]),
        ("blocks.*.hook_out", [4]),
        ("blocks.**.hook_out", [2, 4]),
        ("**.hook_in & layer=-1", [3]),
        ("|score|>=1 & !layer=0", [3]),
        ("sign=- & pin=embed.hook_out", [0, 1]),
        ("status=unreachable", [2]),
        ("position=1-2", [1, 2]),
        ("nothing.*", []),
        ("kind=attn,embed", [0, 1, 3]),
        ("kind=mlp & layer=1", []),
        ("kind=block", [4]),
        ("layer=none", []),
        ("*", [0, 1, 2, 3, 4]),
    ],
)
def test_site_selectors_in_mask_and_sql(text, wanted):
    selector = parse_site_selector(text)
    rows = site_rows()
    assert parse_site_selector(str(selector)) == selector
    mask = selector.mask(rows, n_layers=2, n_heads=1)
    assert np.flatnonzero(mask).tolist() == wanted
    clause, values = selector.condition(SITES, n_layers=2, n_heads=1).sql()
    with duckdb.connect() as base:
        base.register("v_act", rows.append_column("i", pa.array(range(5))))
        found = base.execute(f"select i from v_act where {clause} order by i", values)
        assert [i for (i,) in found.fetchall()] == wanted


def test_a_star_stays_in_its_segment_and_each_site_comes_once():
    assert matching_sites(["blocks.*.*.hook_out", "**.mlp.hook_out"], SITES) == (
        SITES[2],
    )
    assert matching_sites(["blocks.+"], SITES) == ()


@pytest.mark.parametrize(
    ("site", "kind", "layer", "port"),
    [
        ("blocks.3.attn.q.hook_out", "attn", 3, "q"),
        ("blocks.12.attn.hook_k", "attn", 12, "k"),
        ("blocks.0.mlp.hook_out", "mlp", 0, None),
        ("blocks.0.hook_resid_pre", "block", 0, None),
        ("blocks.0.ln1.hook_scale", "ln1", 0, None),
        ("unembed.hook_out", "unembed", None, None),
    ],
)
def test_a_site_is_told_by_its_name(site, kind, layer, port):
    facts = site_facts(site)
    assert (facts.kind, facts.layer, facts.port) == (kind, layer, port)


def test_a_site_name_outside_the_alphabet_is_quoted():
    selector = SiteSelector(sites=("s1|blocks/3|out|1", "none", "a b"))
    assert parse_site_selector(str(selector)) == selector


def test_a_missing_column_is_refused():
    with pytest.raises(ArgumentError) as refused:
        parse_site_selector("head=0").mask(site_rows(), n_layers=2, n_heads=1)
    assert refused.value.code == "selector_column_missing"
