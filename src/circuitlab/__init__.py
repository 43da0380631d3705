"""circuitlab: which edges between a language model's components carry a behaviour.

The public names, loaded when they are first used: `import circuitlab` imports neither
torch nor transformer_lens.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from circuitlab import interventions as interventions
    from circuitlab import tasks as tasks
    from circuitlab.ablations import Mean as Mean
    from circuitlab.ablations import Patch as Patch
    from circuitlab.ablations import Resample as Resample
    from circuitlab.ablations import Zero as Zero
    from circuitlab.acdc import acdc as acdc
    from circuitlab.backends import load_model as load_model
    from circuitlab.calibrate import calibrate as calibrate
    from circuitlab.circuits import Circuit as Circuit
    from circuitlab.circuits import cumulative_mass as cumulative_mass
    from circuitlab.circuits import greedy as greedy
    from circuitlab.circuits import overlap as overlap
    from circuitlab.circuits import prune as prune
    from circuitlab.circuits import threshold as threshold
    from circuitlab.circuits import top_fraction as top_fraction
    from circuitlab.circuits import top_k as top_k
    from circuitlab.circuits import top_nodes as top_nodes
    from circuitlab.edges import combine as combine
    from circuitlab.edges import edge_scores as edge_scores
    from circuitlab.errors import CircuitlabError as CircuitlabError
    from circuitlab.evaluate import curve as curve
    from circuitlab.evaluate import evaluate as evaluate
    from circuitlab.frozen import DEFAULT as DEFAULT
    from circuitlab.graph import component_graph as component_graph
    from circuitlab.interchange import export_circuit as export_circuit
    from circuitlab.interchange import import_circuit as import_circuit
    from circuitlab.methods import EAP as EAP
    from circuitlab.methods import EAPIG as EAPIG
    from circuitlab.methods import CleanCorrupted as CleanCorrupted
    from circuitlab.methods import Exact as Exact
    from circuitlab.metrics import Metric as Metric
    from circuitlab.metrics import accuracy as accuracy
    from circuitlab.metrics import answer_logprob as answer_logprob
    from circuitlab.metrics import custom as custom
    from circuitlab.metrics import kl as kl
    from circuitlab.metrics import logit_diff as logit_diff
    from circuitlab.metrics import normalised as normalised
    from circuitlab.metrics import prob_diff as prob_diff
    from circuitlab.prompts import Prompts as Prompts
    from circuitlab.reads import read as read
    from circuitlab.reads import read_dataset as read_dataset
    from circuitlab.store import Store as Store
    from circuitlab.tables import EdgeTable as EdgeTable
    from circuitlab.targets import seed as seed
    from circuitlab.trace import capture as capture
    from circuitlab.validate import validate as validate

_HOMES = {
    "interventions": "",
    "tasks": "",
    "Mean": "ablations",
    "Patch": "ablations",
    "Resample": "ablations",
    "Zero": "ablations",
    "acdc": "acdc",
    "load_model": "backends",
    "calibrate": "calibrate",
    "Circuit": "circuits",
    "cumulative_mass": "circuits",
    "greedy": "circuits",
    "overlap": "circuits",
    "prune": "circuits",
    "threshold": "circuits",
    "top_fraction": "circuits",
    "top_k": "circuits",
    "top_nodes": "circuits",
    "combine": "edges",
    "edge_scores": "edges",
    "CircuitlabError": "errors",
    "curve": "evaluate",
    "evaluate": "evaluate",
    "DEFAULT": "frozen",
    "component_graph": "graph",
    "export_circuit": "interchange",
    "import_circuit": "interchange",
    "EAP": "methods",
    "EAPIG": "methods",
    "CleanCorrupted": "methods",
    "Exact": "methods",
    "Metric": "metrics",
    "accuracy": "metrics",
    "answer_logprob": "metrics",
    "custom": "metrics",
    "kl": "metrics",
    "logit_diff": "metrics",
    "normalised": "metrics",
    "prob_diff": "metrics",
    "Prompts": "prompts",
    "read": "reads",
    "read_dataset": "reads",
    "Store": "store",
    "EdgeTable": "tables",
    "seed": "targets",
    "capture": "trace",
    "validate": "validate",
}
"""Where each public name lives; a module of its own where that is empty."""

__all__ = list(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'circuitlab' has no attribute {name!r}")
    home = importlib.import_module(f"circuitlab.{_HOMES[name] or name}")
    value = getattr(home, name) if _HOMES[name] else home
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


class _Package(ModuleType):
    """Keeps a public name its own where a module is called the same (`evaluate`)."""

    def __setattr__(self, name: str, value: object) -> None:
        if isinstance(value, ModuleType) and _HOMES.get(name):
            return
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
