"""What the New run form takes: names that are no paths, and uploads."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import streamlit as st
import worker

from circuitlab import tasks as known_tasks
from circuitlab.errors import ArgumentError

_HUB = re.compile(r"[A-Za-z0-9][\w.\-]*(/[A-Za-z0-9][\w.\-]*)?")
_ENDINGS = (".csv", ".jsonl", ".parquet")


def tasks() -> list[str]:
    """The names of the tasks."""
    return list(known_tasks.names())


def model_name(text: str) -> str:
    """A model's name on the hub, or `embedded`. Raises ArgumentError `model_name_invalid`
    for anything else: the app opens no path that a page names."""
    name = text.strip()
    if not _HUB.fullmatch(name) or ".." in name:
        raise ArgumentError(
            "model_name_invalid",
            f"{name!r} is no model name; write embedded or a hub name, as gpt2 or "
            "org/name. A folder is scored from the command line: circuitlab score PATH",
            value=name,
        )
    return name


def keep_upload(store: str, name: str, content: bytes) -> str:
    """Keep an uploaded file under its digest in the store's upload folder; its path.

    Raises ArgumentError `upload_type_unknown`.
    """
    ending = Path(name).suffix.lower()
    if ending not in _ENDINGS:
        raise ArgumentError(
            "upload_type_unknown",
            f"{name!r}: upload a CSV, JSONL or Parquet file of prompt pairs",
            value=name,
            expected=list(_ENDINGS),
        )
    folder = worker.jobs_folder(store).with_suffix(".uploads")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{hashlib.sha256(content).hexdigest()[:24]}{ending}"
    path.write_bytes(content)
    return str(path)


def scored(job: worker.Job) -> None:
    """A finished job: the way to its run."""
    if job.run_id:
        st.page_link(
            "pages/circuit.py",
            label="Open the circuit",
            icon=":material/hub:",
            query_params={"run": job.run_id},
        )
