"""A job on a page: its progress, its log, how it ended; cancelled by a button."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import streamlit as st
import ui
import worker

Shown = Literal["running", "complete", "error"]

STATES: dict[str, tuple[str, Shown]] = {
    "running": ("Running", "running"),
    "done": ("Done", "complete"),
    "failed": ("Failed", "error"),
    "cancelled": ("Cancelled", "error"),
    "lost": ("Lost: the process is gone without a word", "error"),
}


def begin(path: str, title: str, arguments: list[str]) -> None:
    """Start a job, and put it into the URL."""
    st.query_params["job"] = worker.start(path, title, arguments)
    st.rerun()


def show(path: str, when_done: Callable[[worker.Job], object]) -> None:
    """The job of the URL, followed while it runs."""
    job_id = st.query_params.get("job", "")
    if not job_id:
        return
    job = worker.job(path, job_id)
    if job is None:
        st.caption("The job of this link is not here any more.")
        return
    if job.state == "running":
        _followed(path, job_id)
        return
    _panel(job)
    if job.state == "done":
        when_done(job)


@st.fragment(run_every=1.0)
def _followed(path: str, job_id: str) -> None:
    job = worker.job(path, job_id)
    if job is None or job.state != "running":
        st.rerun()
        return
    _panel(job)


def _panel(job: worker.Job) -> None:
    label, state = STATES[job.state]
    title = f"{label}: {job.facts['title']}, {job.seconds:.0f} s"
    with st.status(ui.plain(title), state=state, expanded=job.state != "done"):
        if job.state == "running":
            done = job.progress
            if done is not None:
                st.progress(done, text=f"{done:.0%}")
            if st.button("Cancel", icon=":material/stop:", key=f"cancel-{job.id}"):
                job.cancel()
        log = job.log()
        if log:
            st.code(log, language=None, wrap_lines=True)
        elif job.state == "running":
            st.caption("Starting; loading a model takes a while.")
        st.caption(ui.plain("circuitlab " + " ".join(job.facts["command"])))


def recent(path: str) -> None:
    """The newest jobs, each a link."""
    found = worker.recent(path)
    if not found:
        st.caption("No job was started from the app yet.")
    for job in found:
        if st.button(
            f"{STATES[job.state][0].partition(':')[0]} · {ui.plain(job.facts['title'])} · "
            f"{job.seconds:.0f} s",
            key=f"job-{job.id}",
            type="tertiary",
        ):
            st.query_params["job"] = job.id
            st.rerun()
