"""Loading models from everything that users have, and refusing the rest by name."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from families import FAMILIES, family_model, hf_model, native_bridge, token_prompts
from safetensors.torch import load_file, save_file
from tiny_tokenizers import word_tokenizer

from circuitlab.backends import load_model
from circuitlab.edges import edge_scores
from circuitlab.errors import ArgumentError, CircuitlabError, ModelError
from circuitlab.metrics import logit_diff

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved GPT-2 without a tokenizer."""
    path = tmp_path_factory.mktemp("models") / "tiny-gpt2"
    hf_model("gpt2", torch.float32).save_pretrained(path)
    return path


# --- what loads ---


def test_a_folder_loads_as_the_model_that_was_saved(folder: Path):
    for spec in (folder, str(folder)):
        model = load_model(spec)
        assert model.info.name == "tiny-gpt2"
        assert model.dtype == torch.float32
        assert model.tokenizer is None
        source = load_model(hf_model("gpt2", torch.float32))
        batch = model.batch([[1, 2, 3]])
        assert torch.equal(model.run(batch), source.run(batch))
        assert model.info.weights_digest == source.info.weights_digest


def test_a_relative_folder_and_a_dtype(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder.parent)
    for spec in ("tiny-gpt2", "./tiny-gpt2"):
        assert load_model(spec, dtype="float64").dtype == torch.float64
    assert load_model("tiny-gpt2", dtype=torch.bfloat16).dtype == torch.bfloat16
    assert load_model("tiny-gpt2", device="cpu").device.type == "cpu"


def test_model_objects_need_no_tokenizer_and_take_one():
    source = hf_model("gpt2")
    assert load_model(source).tokenizer is None
    tokenizer = object()
    assert load_model(source, tokenizer=tokenizer).tokenizer is tokenizer
    assert load_model(source).info.architecture == "GPT2LMHeadModel"


def test_a_ready_bridge_loads_in_its_own_dtype():
    bridge = native_bridge(normalization_type="LN")
    model = load_model(bridge)
    assert model.dtype == torch.float64
    assert load_model(bridge, dtype="float64", device="cpu").shape == model.shape
    with pytest.raises(ArgumentError) as caught:
        load_model(bridge, dtype="float32")
    assert caught.value.code == "bridge_is_placed"
    with pytest.raises(ModelError) as caught:
        load_model(bridge, ungroup_kv=True)
    assert caught.value.code == "ungroup_unsupported"


# In a process of its own: importing nnsight patches torch's tensors.
NNSIGHT = """
import sys
import torch
from nnsight import NNsight, TransformersModel
import circuitlab as cl
from circuitlab.errors import ModelError
from tests import read_models
from tests.tiny_tokenizers import word_tokenizer

tokens = [[1, 2, 3, 4]]
hf = read_models.huggingface("gpt2", torch.float32)
plain = cl.load_model(hf)
wrapped = cl.load_model(NNsight(hf))
expected = plain.run(plain.batch(tokens))
torch.testing.assert_close(wrapped.run(wrapped.batch(tokens)), expected)
assert wrapped.info.weights_digest == plain.info.weights_digest

tokenizer = word_tokenizer(["a", "b"])
options = {"task": "text-generation", "tokenizer": tokenizer}
loaded = cl.load_model(TransformersModel(sys.argv[1], dispatch=True, **options))
folder = cl.load_model(sys.argv[1])
assert loaded.tokenizer is tokenizer
assert loaded.info.weights_digest == folder.info.weights_digest

edited = NNsight(hf)
with edited.edit(inplace=True):
    edited.transformer.h[1].mlp.output[:] = 0
for spec in (TransformersModel(sys.argv[1], dispatch=False, **options), edited):
    try:
        cl.load_model(spec)
    except ModelError as error:
        print(error.code)
edited.clear_edits()
cl.load_model(edited)
"""


@pytest.mark.nnsight
def test_a_model_that_nnsight_wraps_is_taken_out(folder: Path, tmp_path: Path):
    pytest.importorskip("nnsight")
    script = tmp_path / "loads.py"  # nnsight reads the source of its blocks
    script.write_text(NNSIGHT)
    found = subprocess.run(
        [sys.executable, str(script), str(folder)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.split()[-2:] == ["model_without_weights", "model_has_edits"]


def test_one_model_however_it_was_loaded(folder: Path):
    """A folder, an object and a bridge of one model give the same scores."""
    prompts, source = token_prompts(), hf_model("gpt2", torch.float32)
    loaded = [load_model(folder), load_model(source)]
    loaded.append(load_model(loaded[0].bridge))  # type: ignore[attr-defined]
    tables = [edge_scores(model, prompts, logit_diff()) for model in loaded]
    tables.append(edge_scores(str(folder), prompts, logit_diff()))
    for table in tables[1:]:
        assert (table.scores == tables[0].scores).all()
        assert table.run.params_digest == tables[0].run.params_digest


def test_ungrouping_repeats_keys_and_values():
    grouped = family_model("llama")
    apart = family_model("llama", ungroup_kv=True)
    assert (grouped.shape.n_kv_heads, apart.shape.n_kv_heads) == (2, 4)
    assert apart.info.processing == "ungrouped_kv"
    assert grouped.info.identity() != apart.info.identity()
    assert family_model("gpt2", ungroup_kv=True).shape.n_kv_heads == 4


def test_loading_is_deterministic_and_leaves_the_random_state(folder: Path):
    before = torch.get_rng_state()
    load_model(folder)
    assert torch.equal(torch.get_rng_state(), before)


# --- what doesn't ---


def edit_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, **values}), encoding="utf-8")


def drop_weight(folder: Path) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    weights.pop(next(name for name in weights if "h.1.mlp" in name))
    save_file(weights, path, metadata={"format": "pt"})


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5000])


BROKEN: dict[str, tuple[str, Callable[[Path], object]]] = {
    "config_is_no_json": (
        "model_unreadable",
        lambda f: (f / "config.json").write_text("{"),
    ),
    "config_is_empty": (
        "model_unreadable",
        lambda f: (f / "config.json").write_text("{}"),
    ),
    "type_is_unknown": ("model_unreadable", lambda f: edit_config(f, model_type="foo")),
    "number_is_a_word": ("model_unreadable", lambda f: edit_config(f, n_layer="two")),
    "width_is_another": ("model_unreadable", lambda f: edit_config(f, n_embd=64)),
    "more_layers_than_weights": (
        "model_unreadable",
        lambda f: edit_config(f, n_layer=3),
    ),
    "weights_are_missing": (
        "model_unreadable",
        lambda f: (f / "model.safetensors").unlink(),
    ),
    "weights_are_noise": (
        "model_unreadable",
        lambda f: (f / "model.safetensors").write_bytes(b"x" * 200),
    ),
    "weights_are_cut_short": ("model_unreadable", truncate),
    "one_weight_is_missing": ("model_unreadable", drop_weight),
    "config_is_missing": (
        "model_file_missing",
        lambda f: (f / "config.json").unlink(),
    ),
}


@pytest.mark.parametrize("damage", BROKEN)
def test_a_damaged_folder_is_refused(folder: Path, tmp_path: Path, damage: str):
    code, break_it = BROKEN[damage]
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    break_it(copy)
    with pytest.raises(ModelError) as caught:
        load_model(copy)
    assert caught.value.code == code
    assert str(copy) in str(caught.value)


@pytest.mark.parametrize(
    ("code", "spec"),
    [
        ("model_not_found", "no-such-model"),
        ("model_not_found", "nobody/no-such-model"),
        ("model_not_found", "not a name"),
        ("model_file_missing", "./no-such-folder"),
        ("model_file_missing", "/no/such/folder"),
        ("model_file_missing", "no-such.gguf"),
        ("model_spec_invalid", None),
        ("model_spec_invalid", 7),
        ("model_spec_invalid", torch.nn.Linear(2, 2)),
    ],
    ids=str,
)
def test_what_is_no_model_is_refused(code: str, spec: Any):
    with pytest.raises(CircuitlabError) as caught:
        load_model(spec)
    assert caught.value.code == code


@pytest.mark.parametrize(
    "content",
    [b"", b"hello", b"GGUF", b"GGUF\x03\0\0\0" + b"\0" * 4, b"GGUF\x03" + b"\xff" * 99],
)
def test_a_damaged_gguf_file_is_refused(tmp_path: Path, content: bytes):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    for spec in (path, tmp_path):
        with pytest.raises(ModelError) as caught:
            load_model(spec)
        assert caught.value.code == "model_unreadable"
    (tmp_path / "second.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError) as caught:
        load_model(tmp_path)
    assert caught.value.code == "model_file_missing"
    assert "2 GGUF files" in str(caught.value)


def test_a_file_that_is_no_model_is_refused(folder: Path):
    for name in ("model.safetensors", "config.json"):
        with pytest.raises(ModelError) as caught:
            load_model(folder / name)
        assert caught.value.code == "model_unreadable"


@pytest.mark.parametrize("dtype", ["int8", "float3", torch.int64, 32, "nn"])
def test_unknown_dtypes_are_refused(dtype: Any):
    with pytest.raises(ArgumentError) as caught:
        load_model(hf_model("gpt2"), dtype=dtype)
    assert caught.value.code == "dtype_unknown"


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "cpu:x"])
def test_unavailable_devices_are_refused(device: str):
    with pytest.raises(ArgumentError) as caught:
        load_model(hf_model("gpt2"), device=device)
    assert caught.value.code == "device_unavailable"


def test_models_without_an_unembedding_are_refused():
    base = hf.AutoModel.from_config(FAMILIES["gpt2"]())
    with pytest.raises(ModelError) as caught:
        load_model(base)
    assert caught.value.code == "architecture_unsupported"
    assert caught.value.fields["reason"]


def test_a_tokenizer_in_the_folder_comes_along(folder: Path, tmp_path: Path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    word_tokenizer("a b c").save_pretrained(copy)
    assert load_model(copy).tokenizer is not None
    (copy / "tokenizer.json").write_text("{", encoding="utf-8")
    (copy / "tokenizer_config.json").unlink()
    assert load_model(copy).tokenizer is None


def test_nothing_is_printed_by_loading_a_missing_model():
    """The error is the message; no traceback or warning of other packages."""
    code = (
        "import circuitlab\n"
        "try:\n"
        "    circuitlab.load_model('./nothing-here')\n"
        "except circuitlab.CircuitlabError as error:\n"
        "    print(error.code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.stdout.split() == ["model_file_missing"], done.stderr


def test_a_model_with_pruned_components_loads_in_every_precision():
    """The embedded model's dead heads and MLPs write nothing, whatever they read."""
    for dtype in (torch.float32, torch.float64):
        model = load_model("embedded", dtype=dtype)
        assert model.shape.n_edges == 262
