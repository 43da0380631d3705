"""Turn what a user names as a model into a bridge: hub, folder, GGUF, object."""

from __future__ import annotations

import copy
import importlib.resources
import pickle
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn

from circuitlab.errors import ArgumentError, ModelError

# What readers of configs, weights and GGUF files raise on broken ones.
_UNREADABLE = (
    OSError,
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    RuntimeError,
    EOFError,
    struct.error,
    pickle.UnpicklingError,
    SafetensorError,
    StrictDataclassError,
)


# Modules draw their weights before these are set; the caller's seeds don't move.
@torch.random.fork_rng(devices=[])
@torch.inference_mode(False)
def load(
    spec: Any,
    *,
    tokenizer: Any,
    device: str | torch.device | None,
    dtype: torch.dtype | str | None,
    revision: str | None,
    trust_remote_code: bool,
    ungroup_kv: bool,
):
    """See `circuitlab.load_model`."""
    kind = _dtype(dtype)
    place = _device(device)
    processing = "ungrouped_kv" if ungroup_kv else "raw"
    spec, tokenizer = _unwrapped(spec, tokenizer)
    if isinstance(spec, nn.Module):
        _require_gradients(spec)
    if _is_bridge(spec):
        return _from_bridge(spec, tokenizer, kind, place, ungroup_kv)
    if isinstance(spec, nn.Module) and hasattr(spec, "config"):
        hf, name = _own_copy(spec, kind, place), _name_of(spec)
    elif isinstance(spec, str | Path):
        hf, found, name = _load_hf(str(spec), revision, trust_remote_code)
        tokenizer = tokenizer or found
    else:
        raise ArgumentError(
            "model_spec_invalid",
            f"{type(spec).__name__} is no model; pass a hub name, a folder, a GGUF file, "
            "a Hugging Face model (also as nnsight wraps it) or a TransformerBridge",
            value=type(spec).__name__,
        )
    wanted = kind or (torch.float32 if isinstance(spec, str | Path) else None)
    hf = hf.to(device=place, dtype=wanted).eval()
    if ungroup_kv:
        from circuitlab.backends.grouping import ungroup

        ungroup(hf)
    return _dissect(_bridge(hf), tokenizer, name, processing)


def _unwrapped(spec: Any, tokenizer: Any) -> tuple[Any, Any]:
    """The module inside an nnsight model, and its tokenizer; anything else as it is."""
    if not any(kind.__module__.startswith("nnsight.") for kind in type(spec).__mro__):
        return spec, tokenizer
    module = spec._module
    if any(parameter.is_meta for parameter in module.parameters()):
        raise ModelError(
            "model_without_weights",
            "this nnsight model has not loaded its weights; make it with dispatch=True",
            value=type(spec).__name__,
        )
    if getattr(spec, "_edits", None):
        raise ModelError(
            "model_has_edits",
            "this nnsight model carries edits of its own, which circuitlab would leave "
            "out; call clear_edits() on it, and use circuitlab's interventions",
            value=len(spec._edits),
        )
    return module, tokenizer or getattr(spec, "tokenizer", None)


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if dtype is None:
        return None
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ArgumentError(
            "dtype_unknown",
            f"{dtype!r} is no floating dtype; write float32, float64 or bfloat16",
            value=str(dtype),
        )
    return found


def _device(device: str | torch.device | None) -> torch.device | None:
    if device is None:
        return None
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:
        raise ArgumentError(
            "device_unavailable",
            f"the device {str(device)!r} can't be used here: {_first_line(error)}",
            value=str(device),
        ) from error
    return found


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _is_bridge(spec: Any) -> bool:
    return (
        isinstance(spec, nn.Module) and hasattr(spec, "blocks") and hasattr(spec, "cfg")
    )


def _name_of(model: Any) -> str:
    name = getattr(getattr(model, "config", None), "_name_or_path", "") or ""
    return Path(name).name or type(model).__name__


def _from_bridge(bridge, tokenizer, dtype, device, ungroup_kv):
    if ungroup_kv:
        raise ModelError(
            "ungroup_unsupported",
            "a ready bridge can't be ungrouped; load the folder or Hugging Face model "
            "with ungroup_kv=True",
            value="TransformerBridge",
        )
    current = next(bridge.parameters())
    if (dtype or current.dtype) != current.dtype or (
        device is not None and device.type != current.device.type
    ):
        raise ArgumentError(
            "bridge_is_placed",
            "a ready bridge keeps its device and dtype; boot it with the ones you want",
            dtype=str(current.dtype),
            device=str(current.device),
        )
    compat = bool(getattr(bridge, "compatibility_mode", False))
    name = str(getattr(bridge.cfg, "model_name", None) or "bridge")
    tokenizer = tokenizer or getattr(bridge, "tokenizer", None)
    return _dissect(bridge, tokenizer, name, "compatibility" if compat else "raw")


def _dissect(bridge: Any, tokenizer: Any, name: str, processing: str):
    from circuitlab.backends.anatomy import dissect

    return dissect(bridge, tokenizer=tokenizer, name=name, processing=processing)


def _require_gradients(model: nn.Module) -> None:
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise ModelError(
            "model_without_gradients",
            "the model's weights were made inside torch.inference_mode(), where torch "
            "allows no gradients; build or load the model outside of it",
            value="inference tensors",
        )


def _own_copy(
    model: nn.Module, dtype: torch.dtype | None, device: torch.device | None
) -> nn.Module:
    """A copy of the module tree over the same parameters: wrapping a model replaces
    its modules, and the user's own object must stay as it was. Parameters that are to be
    moved or cast are copied too, since that is done in place."""
    tensors = [*model.parameters(), *model.buffers()]
    stays = all(
        (dtype or t.dtype) == t.dtype and (device or t.device) == t.device
        for t in tensors
        if t.is_floating_point()
    )
    return copy.deepcopy(model, {id(t): t for t in tensors} if stays else {})


def _bridge(hf: Any) -> Any:
    from transformer_lens.model_bridge.sources._bridge_builder import (
        build_bridge_from_module,
    )

    hf.config._attn_implementation = "eager"
    if hasattr(hf.config, "_experts_implementation"):
        # The grouped kernels take no float64 and their order of sums varies.
        hf.config._experts_implementation = "eager"
    architecture = (getattr(hf.config, "architectures", None) or [type(hf).__name__])[0]
    hf.config.architectures = [architecture]
    parameter = next(hf.parameters())
    try:
        return build_bridge_from_module(
            hf,
            architecture=architecture,
            hf_config=hf.config,
            dtype=parameter.dtype,
            device=str(parameter.device),
            model_name=_name_of(hf),
        )
    except (ValueError, KeyError, AttributeError, NotImplementedError) as error:
        raise ModelError(
            "architecture_unsupported",
            f"TransformerLens has no bridge for {architecture}: {_first_line(error)}",
            architecture=architecture,
            reason=_first_line(error),
        ) from error


def _load_hf(spec: str, revision: str | None, trust_remote_code: bool):
    if spec == "embedded":
        spec = str(embedded_folder())
    path = Path(spec).expanduser()
    if path.suffix == ".gguf" or (
        path.is_dir() and not (path / "config.json").exists()
    ):
        return _load_gguf(path)
    if not path.exists() and (spec.startswith((".", "/", "~")) or spec.count("/") > 1):
        raise ModelError(
            "model_file_missing",
            f"there is no model folder or file at {spec!r}",
            value=spec,
        )
    return _load_pretrained(spec, path, revision, trust_remote_code)


def embedded_folder() -> Path:
    """The folder of the small model that circuitlab ships."""
    return Path(str(importlib.resources.files("circuitlab"))) / "data" / "embedded"


def _load_pretrained(spec: str, path: Path, revision, trust_remote_code):
    import transformers

    options = {"revision": revision, "trust_remote_code": trust_remote_code}
    # Its declared type forgets that loading information comes beside the model.
    models: Any = transformers.AutoModelForCausalLM
    where = str(path) if path.exists() else spec
    try:
        model, info = models.from_pretrained(
            where,
            attn_implementation="eager",
            dtype=torch.float32,
            output_loading_info=True,
            **options,
        )
    except _UNREADABLE as error:
        raise _load_error(spec, path, error) from error
    _require_weights(spec, info["missing_keys"])
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(where, **options)
    except _UNREADABLE:
        tokenizer = None
    if tokenizer is not None and not tokenizer.vocab_size:
        # Without tokenizer files some classes give one that knows no word.
        tokenizer = None
    return model, tokenizer, path.name if path.exists() else spec


def _load_error(spec: str, path: Path, error: Exception) -> ModelError:
    if path.exists():
        return ModelError(
            "model_unreadable",
            f"the model in {spec!r} can't be read: {_first_line(error)}",
            value=spec,
        )
    return ModelError(
        "model_not_found",
        f"no model {spec!r}: it is no local folder, and the hub did not give it "
        f"({_first_line(error)}); check the name, or pass a folder",
        value=spec,
    )


def _require_weights(spec: str, missing: Iterable[str]) -> None:
    """Weights that a file lacks would be drawn at random, with only a warning."""
    names = sorted(missing)
    if names:
        raise ModelError(
            "model_unreadable",
            f"the model in {spec!r} lacks {len(names)} weights ({names[0]}, …); get its "
            "files again",
            value=spec,
            missing=names,
        )


def _load_gguf(path: Path):
    import transformers

    file = _gguf_file(path)
    models: Any = transformers.AutoModelForCausalLM
    config = transformers.GgufConfig(dequantize=True)
    try:
        packed, info = models.from_pretrained(
            str(file.parent),
            gguf_file=file.name,
            quantization_config=config,
            output_loading_info=True,
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(file.parent), gguf_file=file.name
        )
    except _UNREADABLE as error:
        raise _load_error(str(file), file, error) from error
    _require_weights(str(file), info["missing_keys"])
    # The loaded model is marked as quantized; a clean one with its weights is not.
    clean = copy.deepcopy(packed.config)
    if hasattr(clean, "quantization_config"):
        del clean.quantization_config
    model = models.from_config(clean, attn_implementation="eager", dtype=torch.float32)
    model.load_state_dict(packed.state_dict())
    model.tie_weights()
    return model, tokenizer, file.stem


def _gguf_file(path: Path) -> Path:
    if not path.exists():
        raise ModelError(
            "model_file_missing", f"there is no file {str(path)!r}", value=str(path)
        )
    files = sorted(path.glob("*.gguf")) if path.is_dir() else [path]
    if len(files) != 1 or not files[0].is_file():
        raise ModelError(
            "model_file_missing",
            f"{str(path)!r} holds no config.json and {len(files)} GGUF files; name a "
            "model folder or one .gguf file",
            value=str(path),
        )
    return files[0]
