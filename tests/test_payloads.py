"""Payloads, plans and their JSON: each fault of the second seed's payloads is a test."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from families import family_model

import circuitlab as cl
from circuitlab.errors import ArgumentError, CircuitlabError
from circuitlab.interventions import (
    BySite,
    ForAll,
    InOrder,
    Labelled,
    OneEach,
    Payload,
    PerExample,
    Plan,
    baseline,
    intervene,
    intervene_each,
    inventory,
    load_payloads,
    parse_payloads,
    plan,
    run,
)
from circuitlab.prompts import Prompts

ROWS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8]]
PROMPTS = Prompts.from_tokens(ROWS, ROWS, [1, 2, 3], [4, 5, 6])
MLPS, MLP0, MLP1 = (
    "blocks.*.hook_mlp_out",
    "blocks.0.hook_mlp_out",
    "blocks.1.hook_mlp_out",
)
V = torch.linspace(-1, 1, 32, dtype=torch.float64)
METRIC = cl.logit_diff()


@cache
def model_of(family: str, layers: int = 2) -> Any:
    if layers == 2:
        return family_model(family)
    import transformers as hf

    from circuitlab.backends import load_model

    torch.manual_seed(0)
    config = hf.GPT2Config(
        vocab_size=61, n_embd=32, n_layer=layers, n_head=4, n_inner=48, n_positions=64
    )
    network = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return load_model(network.double().eval())


@pytest.fixture(params=["gpt2", "neox_parallel", "llama"])
def model(request: pytest.FixtureRequest) -> Any:
    return model_of(request.param)


@pytest.fixture(scope="module")
def toy() -> Any:
    return model_of("gpt2")


def code(attempt: Any) -> str:
    with pytest.raises(CircuitlabError) as refused:
        attempt()
    assert refused.value.fields["code"] == refused.value.code
    return refused.value.code


def at_last(model: Any, name: str, change: Any) -> torch.Tensor:
    """The metric with a plain hook of the bridge at each row's last real token."""
    batch = baseline(model, PROMPTS, METRIC).batch

    def hook(value: torch.Tensor, hook: object) -> torch.Tensor:
        new = value.clone()
        for row, last in enumerate(batch.last.tolist()):
            new[row, last] = change(value[row, last])
        return new

    with torch.no_grad():
        logits = model.bridge.run_with_hooks(
            batch.tokens,
            attention_mask=batch.mask.long(),
            fwd_hooks=[(name, hook)],
            prepend_bos=False,
        )
    return METRIC(logits, batch)


MODES: dict[str, tuple[Payload, Any]] = {
    "replace": (Payload(V), lambda x: V),
    "replace_number": (
        Payload(torch.tensor(0.5).double()),
        lambda x: torch.full_like(x, 0.5),
    ),
    "add": (Payload(V, "add"), lambda x: x + V),
    "add_scaled": (Payload(V, "add", 3.0), lambda x: x + 3 * V),
    "project_onto": (Payload(V, "project"), lambda x: x.dot(V) / V.dot(V) * V),
    "project_scaled": (
        Payload(V, "project", 2.0),
        lambda x: 2 * x.dot(V) / V.dot(V) * V,
    ),
    "project_out": (
        Payload(V, "project", project="out"),
        lambda x: x - x.dot(V) / V.dot(V) * V,
    ),
    "scale": (Payload(mode="scale", scale_factor=-0.5), lambda x: -0.5 * x),
}


@pytest.mark.parametrize("name", MODES)
def test_a_mode_does_at_the_last_real_token_what_a_plain_hook_does(
    model: Any, name: str
):
    payload, change = MODES[name]
    found = intervene(model, PROMPTS, {MLP1: payload}, METRIC)
    expected = at_last(model, MLP1, change)
    rows = found.rows.to_pandas()
    torch.testing.assert_close(
        torch.tensor(rows["metric"].to_numpy()), expected, rtol=1e-6, atol=1e-6
    )
    plain = baseline(model, PROMPTS, METRIC)
    torch.testing.assert_close(
        torch.tensor(rows["metric_baseline"].to_numpy()), plain.metric
    )
    assert (rows["metric"] - rows["metric_baseline"]).to_list() == rows[
        "change"
    ].to_list()
    last = plain.logits[torch.arange(3), plain.batch.last]
    torch.testing.assert_close(found.baseline_logits, last)
    assert found.logits["edits"].shape == last.shape
    notes = found.record["edits"][0]["notes"]
    assert notes[0]["positions"] == [[4], [2], [3]]


def test_batches_and_set_counts_change_no_number(model: Any):
    sets = {
        "noise": {
            MLPS: Payload(Labelled(torch.randn(3, 32), "batch", "feature"), "add")
        },
        "heads": {
            "blocks.*.attn.hook_z": Payload(mode="scale", scale_factor=0.0, heads=(1,))
        },
        "rows": {MLP0: Payload(V, positions=PerExample([0, 1, (0, 2)]))},
    }
    whole = intervene_each(model, PROMPTS, sets, METRIC)
    for batch_size, sets_per_pass in ((1, 1), (2, 3), (3, 2)):
        found = intervene_each(
            model,
            PROMPTS,
            sets,
            METRIC,
            batch_size=batch_size,
            sets_per_pass=sets_per_pass,
        )
        for column in ("metric", "metric_baseline", "change"):
            one = torch.tensor(whole.rows[column].to_numpy())
            other = torch.tensor(found.rows[column].to_numpy())
            torch.testing.assert_close(one, other)
        assert found.rows["edits"] == whole.rows["edits"]
        for name in sets:
            torch.testing.assert_close(found.logits[name], whole.logits[name])


def test_the_baseline_is_computed_once_for_each_batch(toy: Any):
    inventory(toy)  # found by a forward of its own, once a model
    forwards = []
    handle = toy.bridge.original_model.register_forward_hook(
        lambda _m, args, _o: forwards.append(len(args[0]))
    )
    try:
        sets = {f"set {i}": {MLP0: Payload(i * V)} for i in range(4)}
        intervene_each(toy, PROMPTS, sets, METRIC, batch_size=2, sets_per_pass=4)
    finally:
        handle.remove()
    assert forwards == [2, 8, 1, 4]


def test_metrics_that_compare_with_the_clean_run_are_reported(toy: Any):
    found = intervene(toy, PROMPTS, {MLP1: Payload(V)}, cl.kl()).rows.to_pandas()
    assert found["metric_baseline"].abs().max() < 1e-12
    assert found["metric"].min() > 0


# --- payloads are strict records ---


def test_a_payload_is_no_sequence_so_four_matches_are_four_sites():
    """As a tuple of four fields it would be unpacked over exactly four matches."""
    model = model_of("gpt2", layers=4)
    found = plan(model, {MLPS: Payload(V)})
    assert [site for site, _ in found.entries] == [
        f"blocks.{i}.mlp.hook_out" for i in range(4)
    ]
    assert not isinstance(Payload(V), Sequence)


@pytest.mark.parametrize("layers", [2, 3])
def test_a_list_means_what_its_wrapper_says_on_every_model(layers: int):
    model = model_of("gpt2", layers=layers)
    two = [Payload(V), Payload(V, "add")]
    assert code(lambda: plan(model, {MLPS: two})) == "payload_list_ambiguous"
    both = plan(model, {MLPS: InOrder(two)})
    assert [len(found) for _, found in both.entries] == [2] * layers
    each = lambda: plan(model, {MLPS: OneEach(two)})
    if layers == 2:
        assert [found[0].payload.mode for _, found in each().entries] == [
            "replace",
            "add",
        ]
    else:
        assert code(each) == "payload_count_mismatch"


def test_one_payload_for_each_site_by_depth_or_by_name(toy: Any):
    one, other = Payload(V), Payload(2 * V)
    by_depth = plan(toy, {MLPS: OneEach([one, other])})
    by_name = plan(toy, {MLPS: BySite({"blocks.1.mlp.hook_out": other, MLP0: one})})
    apart = plan(toy, {MLP1: other, MLP0: one})
    assert by_depth == by_name == apart
    missing = {MLPS: BySite({MLP0: one})}
    assert code(lambda: plan(toy, missing)) == "payload_site_missing"
    surplus = {MLP0: BySite({MLP0: one, MLP1: other})}
    assert code(lambda: plan(toy, surplus)) == "payload_site_missing"
    assert plan(toy, {MLPS: ForAll(one)}) == plan(toy, {MLPS: one})
    nested = plan(toy, {MLPS: OneEach([InOrder([one, other]), one])})
    assert [len(found) for _, found in nested.entries] == [2, 1]


def test_ordered_payloads_act_and_are_stored_in_order(toy: Any):
    first, second = Payload(V, "add"), Payload(mode="scale", scale_factor=3.0)
    forth = intervene(toy, PROMPTS, {MLP1: InOrder([first, second])}, METRIC)
    back = intervene(toy, PROMPTS, {MLP1: InOrder([second, first])}, METRIC)
    modes = [row["mode"] for row in forth.plans["edits"].preview()]
    assert modes == ["add", "scale"]
    for found, change in (
        (forth, lambda x: 3 * (x + V)),
        (back, lambda x: 3 * x + V),
    ):
        expected = at_last(toy, MLP1, change)
        metric = torch.tensor(found.rows["metric"].to_numpy())
        torch.testing.assert_close(metric, expected, rtol=1e-8, atol=1e-8)


def test_plans_are_values(toy: Any):
    first, second = (plan(toy, {MLPS: Payload(V.clone())}) for _ in range(2))
    assert first == second
    assert len({first, second}) == 1
    assert first.digest == second.digest
    assert first != plan(toy, {MLPS: Payload(V + 1)})
    assert first != plan(toy, {MLPS: Payload(V, positions="all")})
    assert first != plan(toy, {MLPS: Payload(V, heads=(0,))})
    with pytest.raises(AttributeError):
        first.entries = ()  # type: ignore[misc]


def test_a_tensor_changed_afterwards_changes_no_plan(toy: Any):
    tensor = V.clone()
    found = plan(toy, {MLP1: Payload(tensor)})
    before = run(toy, PROMPTS, found.edits, METRIC, grad=False).metric
    tensor.zero_()
    after = run(toy, PROMPTS, found.edits, METRIC, grad=False).metric
    torch.testing.assert_close(before, after)


def test_a_plan_names_canonical_sites_whatever_the_spelling(toy: Any):
    named = plan(toy, {"blocks.0.mlp.hook_out": Payload(V)})
    assert named == plan(toy, {MLP0: Payload(V)})
    double = {"blocks.0.mlp.hook_out": Payload(V), MLP0: Payload(V)}
    assert code(lambda: plan(toy, double)) == "edit_duplicate_site"
    neox = model_of("neox_parallel")
    middle = {"blocks.0.hook_resid_mid": Payload(V)}
    assert code(lambda: plan(neox, middle)) == "site_unknown"


@pytest.mark.parametrize(
    "payload", [V, V.numpy(), {"tensor": V}, {"tensor": V.tolist()}]
)
def test_tensors_arrays_and_mappings_are_payloads(toy: Any, payload: Any):
    found = plan(toy, {MLP0: payload})
    assert found == plan(toy, {MLP0: Payload(V)})


BAD: dict[str, Any] = {
    "payload_unknown_key": {"tensor": V, "scale": 2.0},
    "payload_mode_unknown": {"tensor": V, "mode": "Replace"},
    "payload_scale_unused": {"tensor": V, "scale_factor": 2.0},
    "payload_scale_missing": {"mode": "scale"},
    "payload_tensor_missing": {"mode": "add"},
    "payload_tensor_unused": {"tensor": V, "mode": "scale", "scale_factor": 1.0},
    "payload_setting_invalid": {"tensor": V, "mode": "project", "project": "both"},
    "payload_invalid": 1.0,
    "payload_list_ambiguous": [],
    "payloads_empty": InOrder([]),
    "number_invalid": {"mode": "scale", "scale_factor": "2"},
    "heads_invalid": {"tensor": V, "heads": ()},
    "positions_invalid": {"tensor": V, "positions": []},
    "donor_not_finite": {"tensor": [float("inf")]},
    "donor_unreadable": {"tensor": "V"},
    "direction_zero": {"tensor": 0 * V, "mode": "project"},
    "reversed_projection_unsupported": {
        "tensor": V,
        "use_intervention_tensor_as_basis": False,
    },
}


@pytest.mark.parametrize("expected", BAD)
def test_a_payload_that_makes_no_sense_is_refused(toy: Any, expected: str):
    assert code(lambda: plan(toy, {MLP0: BAD[expected]})) == expected


def test_an_empty_plan_and_other_containers_are_refused(toy: Any):
    assert code(lambda: plan(toy, {})) == "payloads_empty"
    assert code(lambda: plan(toy, [(MLP0, V)])) == "payloads_invalid"  # type: ignore[arg-type]


def test_shapes_are_refused_with_the_facts(toy: Any):
    with pytest.raises(ArgumentError) as refused:
        intervene(toy, PROMPTS, {MLP0: Payload(torch.ones(7))}, METRIC)
    assert refused.value.code == "donor_shape_invalid"
    assert refused.value.fields["site"] == "blocks.0.mlp.hook_out"


# --- where a setting comes from ---


def test_a_setting_is_the_payload_s_else_the_call_s_else_the_config_s(toy: Any):
    config = {"mode": "scale", "scale_factor": 5.0, "positions": "all"}

    def row(payload: Payload, **arguments: Any) -> dict[str, Any]:
        return plan(toy, {MLP0: payload}, config=config, **arguments).preview()[0]

    found = row(Payload())
    assert (found["mode"], found["scale_factor"], found["positions"]) == (
        "scale",
        5.0,
        "all",
    )
    assert found["origins"]["mode"] == found["origins"]["positions"] == "config"
    assert found["origins"]["heads"] == "default"
    found = row(Payload(), scale_factor=2.0)
    assert (found["scale_factor"], found["origins"]["scale_factor"]) == (
        2.0,
        "argument",
    )
    found = row(Payload(scale_factor=7.0), positions="last")
    assert (found["scale_factor"], found["origins"]["scale_factor"]) == (7.0, "payload")
    assert (found["positions"], found["origins"]["positions"]) == ("last", "argument")


def test_two_explicit_settings_that_differ_are_refused(toy: Any):
    conflict = lambda: plan(toy, {MLP0: Payload(V, positions="all")}, positions="last")
    assert code(conflict) == "payload_conflict"
    plan(toy, {MLP0: Payload(V, positions="all")}, positions="all")


def test_unknown_settings_are_refused(toy: Any):
    assert (
        code(lambda: plan(toy, {MLP0: V}, config={"scale": 1.0}))
        == "payload_unknown_key"
    )
    assert code(lambda: plan(toy, {MLP0: V}, position="all")) == "payload_unknown_key"


# --- JSON ---

TEXT = json.dumps(
    {
        "edits": {
            "blocks.*.attn.hook_z": {
                "mode": "scale",
                "scale_factor": 0,
                "heads": [0, 2],
            },
            MLPS: {
                "one_each": [
                    {"intervention_tensor": V.tolist()},
                    {
                        "in_order": [
                            {
                                "mode": "add",
                                "intervention_tensor": V.tolist(),
                                "scale_factor": 2,
                            },
                            {
                                "mode": "project",
                                "project": "out",
                                "intervention_tensor": V.tolist(),
                            },
                        ]
                    },
                ]
            },
            "blocks.1.hook_out": {
                "mode": "add",
                "intervention_tensor": [[1.0], [2.0], [3.0]],
                "axes": ["batch", "feature"],
                "positions": {"per_example": [0, [1, 2], -1]},
            },
        },
        "config": {"positions": "all"},
    }
)
SAME = {
    "blocks.*.attn.hook_z": Payload(
        mode="scale", scale_factor=0.0, heads=(0, 2), positions="all"
    ),
    MLPS: OneEach(
        [
            Payload(V, positions="all"),
            InOrder(
                [
                    Payload(V, "add", 2.0, positions="all"),
                    Payload(V, "project", project="out", positions="all"),
                ]
            ),
        ]
    ),
    "blocks.1.hook_out": Payload(
        Labelled(torch.tensor([[1.0], [2.0], [3.0]]).double(), "batch", "feature"),
        "add",
        positions=PerExample([0, (1, 2), -1]),
    ),
}


def test_json_says_what_python_says(toy: Any, tmp_path: Path):
    path = tmp_path / "edits.json"
    path.write_text(TEXT, encoding="utf-8")
    file = load_payloads(path)
    found = plan(toy, file.payloads, config=file.config)
    assert found == plan(toy, SAME)
    assert isinstance(found, Plan)
    outcome = intervene(toy, PROMPTS, file.payloads, METRIC, config=file.config)
    assert outcome.rows.num_rows == 3
    json.dumps(outcome.record["edits"])
    json.dumps(found.preview())


def _edit(payload: str) -> str:
    return f'{{"edits": {{"{MLP0}": {payload}}}}}'


BAD_JSON = {
    "not JSON": ("{", "edits_json_invalid"),
    "a list": ("[]", "edits_json_invalid"),
    "no edits": ("{}", "edits_json_invalid"),
    "empty edits": ('{"edits": {}}', "edits_json_invalid"),
    "unknown at the top": ('{"edits": {}, "edit": {}}', "payload_unknown_key"),
    "unknown key": (
        _edit('{"intervention_tensor": [1], "scale": 2}'),
        "payload_unknown_key",
    ),
    "the python name": (_edit('{"tensor": [1]}'), "payload_unknown_key"),
    "a text for a number": (
        _edit('{"mode": "scale", "scale_factor": "2"}'),
        "edits_json_invalid",
    ),
    "a truth for a number": (
        _edit('{"mode": "scale", "scale_factor": true}'),
        "edits_json_invalid",
    ),
    "NaN": (_edit('{"intervention_tensor": [NaN]}'), "edits_json_invalid"),
    "too large": (_edit('{"intervention_tensor": [1e999]}'), "donor_not_finite"),
    "a key twice": (_edit('{"mode": "add", "mode": "scale"}'), "edits_json_invalid"),
    "a bare list": (_edit('[{"intervention_tensor": [1]}]'), "payload_list_ambiguous"),
    "two wrappers": (_edit('{"for_all": {}, "one_each": []}'), "edits_json_invalid"),
    "an empty order": (_edit('{"in_order": []}'), "edits_json_invalid"),
    "ragged numbers": (
        _edit('{"intervention_tensor": [[1], [1, 2]]}'),
        "donor_unreadable",
    ),
    "truths": (_edit('{"intervention_tensor": true}'), "donor_unreadable"),
    "heads of text": (
        _edit('{"intervention_tensor": 1, "heads": ["0"]}'),
        "edits_json_invalid",
    ),
    "a position of text": (
        _edit('{"intervention_tensor": 1, "positions": "end"}'),
        "positions_invalid",
    ),
    "a mode": (
        _edit('{"intervention_tensor": 1, "mode": "ADD"}'),
        "payload_mode_unknown",
    ),
    "config with a tensor": (
        '{"edits": {"a": {}}, "config": {"intervention_tensor": 1}}',
        "payload_unknown_key",
    ),
}


@pytest.mark.parametrize("what", BAD_JSON)
def test_json_is_strict(what: str):
    text, expected = BAD_JSON[what]
    assert code(lambda: parse_payloads(text)) == expected


@pytest.mark.parametrize("value", ["true", "false", '"false"'])
def test_the_reversed_projection_is_refused_with_its_reason(value: str):
    text = _edit(
        f'{{"intervention_tensor": [1], "use_intervention_tensor_as_basis": {value}}}'
    )
    with pytest.raises(ArgumentError) as refused:
        parse_payloads(text)
    assert refused.value.code == "reversed_projection_unsupported"
    assert refused.value.fields["reason"] == "reversed_projection_left_out"
    assert "on purpose" in str(refused.value)


def test_a_missing_file_is_refused(tmp_path: Path):
    assert code(lambda: load_payloads(tmp_path / "none.json")) == "edits_file_missing"


@pytest.mark.parametrize("family", ["gpt2", "neox_parallel", "llama", "opt", "gemma2"])
def test_a_plan_over_every_writable_site_runs(family: str):
    model = model_of(family)
    sites = {
        s.name: {"mode": "scale", "scale_factor": 0.99}
        for s in inventory(model)
        if s.writable
        and s.axes[-1] == "feature"
        and "pos" in s.axes
        and s.axes[0] == "batch"
    }
    found = intervene(model, PROMPTS, sites, METRIC)
    assert len(found.plans["edits"]) == len(sites) > 40


@pytest.mark.real_model
def test_payloads_on_smollm2(smollm2: Any):
    model = cl.load_model(str(smollm2))
    prompts = cl.tasks.greater_than(n=4, seed=0, model=model)
    text = '{"edits": {"blocks.1*.attn.hook_z": {"mode": "scale", "scale_factor": 0}}}'
    file = parse_payloads(text)
    whole = intervene(model, prompts, file.payloads, cl.logit_diff())
    parts = intervene(model, prompts, file.payloads, cl.logit_diff(), batch_size=2)
    one, other = (torch.tensor(t.rows["change"].to_numpy()) for t in (whole, parts))
    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    assert float(one.abs().min()) > 1e-3
    assert len(whole.plans["edits"]) == 11
