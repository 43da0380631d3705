"""The worker behind Validate: a circuit from every side, saved as one evaluation.

A program of its own, because it loads torch and a model: no page imports it. It prints
the run id as JSON, and errors as the command line does.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace

from circuitlab.circuits import Circuit
from circuitlab.cli_bench import Bench, load_circuit, open_store
from circuitlab.cli_options import Measuring
from circuitlab.cli_output import progress
from circuitlab.errors import ArgumentError, CircuitlabError

EDGE_BY_EDGE = 120
"""The most edges that are taken out one by one; of larger circuits, components are."""


def prove(options: argparse.Namespace) -> str:
    """Evaluate the circuit, its complement, knock-outs, random circuits of its size and
    what is left without each part; returns the saved run's id."""
    from circuitlab.validate import validate

    with open_store(options.store) as store:
        circuit, run_id = load_circuit(store, options.circuit)
        if not isinstance(circuit, Circuit):
            raise ArgumentError(
                "circuit_needed",
                f"{options.circuit} is a run of scores; give a circuit's id",
                value=options.circuit,
            )
        asked = Measuring(options.ablation, options.metric, options.on)
        bench = Bench.of(circuit.run, asked)
        by = "edges" if len(circuit.edges) <= EDGE_BY_EDGE else "components"
        with progress("Validating") as advance:
            found = validate(
                bench.model,
                bench.prompts,
                bench.recipe.metric_value(),
                circuit,
                ablation=options.ablation,
                scored=bench.scored,
                minimality=by,
                progress=advance,
            )
        found = replace(found, run=replace(found.run, parent=run_id))
        return store.save(found, prompts=bench.prompts)


def main() -> int:
    parser = argparse.ArgumentParser(prog="circuitlab validate")
    parser.add_argument("circuit")
    parser.add_argument("--ablation", default="patch")
    parser.add_argument("--metric")
    parser.add_argument("--on", default="held-out")
    parser.add_argument("--store")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    try:
        sys.stdout.write(json.dumps({"run_id": prove(options)}) + "\n")
    except CircuitlabError as error:
        sys.stderr.write(f"error[{error.code}]: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
