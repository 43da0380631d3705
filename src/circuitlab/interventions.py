"""Interventions: verbs that edit a site of a pass, and the doors that run them.

`run(model, prompts, {"blocks.*.attn.hook_z": at_heads([0], zero_ablate())})`. The names
here are the whole surface; how each part is made stands in the modules they come from.
"""

from __future__ import annotations

from circuitlab.donors import Labelled, Population
from circuitlab.doors import Baseline, Outcome, baseline, bind, resume, run
from circuitlab.edits import Edit, Edits, Resolved, resolve_edits
from circuitlab.inventory import inventory
from circuitlab.payload_json import PayloadFile, load_payloads, parse_payloads
from circuitlab.payloads import BySite, ForAll, InOrder, OneEach, Payload
from circuitlab.plans import Plan, plan
from circuitlab.selections import (
    Door,
    PerExample,
    at_heads,
    at_positions,
    compose,
    keep_grad,
    subspace,
    units,
)
from circuitlab.site_info import Inventory, SiteInfo
from circuitlab.sourced import (
    interpolate,
    mean_ablate,
    patch_from,
    replace_with,
    resample_rows_from,
    scramble_elements,
    set_affine_coordinates,
    set_direction_mean,
    swap_with,
    zero_ablate,
)
from circuitlab.sweeps import Interventions, intervene, intervene_each, run_each
from circuitlab.verb import Firing, Verb, as_verb
from circuitlab.verbs import (
    add,
    add_noise,
    clamp,
    freeze,
    permute_batch,
    project_onto,
    project_out,
    scale,
    splice_module,
    steer,
)

__all__ = [
    "Baseline",
    "BySite",
    "Door",
    "Edit",
    "Edits",
    "Firing",
    "ForAll",
    "InOrder",
    "Interventions",
    "Inventory",
    "Labelled",
    "OneEach",
    "Outcome",
    "Payload",
    "PayloadFile",
    "PerExample",
    "Plan",
    "Population",
    "Resolved",
    "SiteInfo",
    "Verb",
    "add",
    "add_noise",
    "as_verb",
    "at_heads",
    "at_positions",
    "baseline",
    "bind",
    "clamp",
    "compose",
    "freeze",
    "interpolate",
    "intervene",
    "intervene_each",
    "inventory",
    "keep_grad",
    "load_payloads",
    "mean_ablate",
    "parse_payloads",
    "patch_from",
    "permute_batch",
    "plan",
    "project_onto",
    "project_out",
    "replace_with",
    "resample_rows_from",
    "resolve_edits",
    "resume",
    "run",
    "run_each",
    "scale",
    "scramble_elements",
    "set_affine_coordinates",
    "set_direction_mean",
    "splice_module",
    "steer",
    "subspace",
    "swap_with",
    "units",
    "zero_ablate",
]
