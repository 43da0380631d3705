"""Circuits and scores as files that other tools read, and back.

`export_circuit` and `import_circuit` choose the format by the file's ending, or by
name: `eap-ig` (the JSON of EAP-IG's graphs), `mib` (the same, as MIB's circuit track
takes it), `json` (ours, with everything), `graphml`, `dot`, `csv`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, get_args

from circuitlab.circuit import Circuit
from circuitlab.errors import ArgumentError, DataError
from circuitlab.interchange.eapig import eapig_text, mib_text, read_eapig
from circuitlab.interchange.eapig import write_mib as write_mib
from circuitlab.interchange.graphs import (
    dot_text,
    graphml_text,
    read_dot,
    read_graphml,
)
from circuitlab.interchange.grouping import group_circuit as group_circuit
from circuitlab.interchange.grouping import ungroup_circuit as ungroup_circuit
from circuitlab.interchange.plain import csv_text, json_text, read_csv, read_json
from circuitlab.interchange.records import Imported as Imported
from circuitlab.interchange.records import invalid, json_object
from circuitlab.sites import ModelShape
from circuitlab.tables import EdgeTable

Format = Literal["eap-ig", "mib", "json", "graphml", "dot", "csv"]
Writer = Callable[[Circuit, EdgeTable | None], str]
Reader = Callable[[str, ModelShape | None], Imported]

ENDINGS: Mapping[str, Format] = {
    ".json": "json",
    ".graphml": "graphml",
    ".dot": "dot",
    ".gv": "dot",
    ".csv": "csv",
}
WRITERS: Mapping[str, Writer] = {
    "eap-ig": eapig_text,
    "mib": mib_text,
    "json": json_text,
    "graphml": graphml_text,
    "dot": dot_text,
    "csv": csv_text,
}


def export_circuit(
    path: str | Path,
    circuit: Circuit,
    edges: EdgeTable | None = None,
    *,
    format: Format | None = None,
) -> Path:
    """Write a circuit, with the scores of a table where the format has room for them.

    A `.json` file is ours unless `format` says otherwise. Returns the path. Raises
    ArgumentError `format_unknown`, or what the format's writer refuses.
    """
    path = Path(path)
    text = WRITERS[_format(path, format)](circuit, edges)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def import_circuit(
    path: str | Path, *, format: Format | None = None, shape: ModelShape | None = None
) -> Imported:
    """Read a circuit that `export_circuit`, EAP-IG or MIB wrote.

    A `.json` file may be ours or EAP-IG's: its keys tell. `shape` is the model's, where
    the file doesn't say all of it. Raises DataError `interchange_invalid` with the
    place, `interchange_missing` for a file that is not there, ArgumentError
    `format_unknown` or `edge_unknown`.
    """
    path = Path(path)
    readers: Mapping[str, Reader] = {
        "eap-ig": read_eapig,
        "mib": read_eapig,
        "json": _read_any_json,
        "graphml": read_graphml,
        "dot": read_dot,
        "csv": read_csv,
    }
    reader = readers[_format(path, format)]
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(
            "interchange_missing", f"there is no file {path}", value=str(path)
        ) from None
    except UnicodeDecodeError as error:
        raise invalid(f"{path} is not a text file", str(error)) from None
    return reader(text, shape)


def _read_any_json(text: str, shape: ModelShape | None) -> Imported:
    theirs = "cfg" in json_object(text)
    return read_eapig(text, shape) if theirs else read_json(text, shape)


def _format(path: Path, format: str | None) -> str:
    found = format or ENDINGS.get(path.suffix.lower())
    if found not in get_args(Format):
        raise ArgumentError(
            "format_unknown",
            f"{found or path.name!r} is no known format; pass format=, one of "
            f"{', '.join(get_args(Format))}",
            value=found or path.name,
            expected=list(get_args(Format)),
        )
    return str(found)
