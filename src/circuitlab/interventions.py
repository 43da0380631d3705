"""Interventions: verbs that edit a site of a pass, and the doors that run them.

`run(model, prompts, {"blocks.*.attn.hook_z": at_heads([0], zero_ablate())})`. The names
here are the whole surface; how each part is made stands in the modules they come from.
"""

from __future__ import annotations

from circuitlab.donors import Labelled, Population
from circuitlab.doors import (
    Baseline,
    Edit,
    Edits,
    Outcome,
    Resolved,
    baseline,
    bind,
    resolve_edits,
    resume,
    run,
)
from circuitlab.inventory import inventory
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
    "Door",
    "Edit",
    "Edits",
    "Firing",
    "Inventory",
    "Labelled",
    "Outcome",
    "PerExample",
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
    "inventory",
    "keep_grad",
    "mean_ablate",
    "patch_from",
    "permute_batch",
    "project_onto",
    "project_out",
    "replace_with",
    "resample_rows_from",
    "resolve_edits",
    "resume",
    "run",
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
