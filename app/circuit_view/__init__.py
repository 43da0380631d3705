"""The picture of a circuit, as a Streamlit component: inline SVG, nothing from outside.

Takes the arrays of `view.picture` and a view; the browser draws, cuts, prunes, pins,
hides, groups and exports on its own, and reports its state as JSON text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from streamlit.components.v2 import component

_HERE = Path(__file__).parent


def _text(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


_mount = component(
    "circuit_view",
    html=_text("view.html"),
    css=_text("view.css"),
    js=_text("layout.js") + _text("export.js") + _text("view.js"),
)


def circuit_view(
    picture: Mapping[str, Any],
    state: Mapping[str, Any],
    *,
    key: str,
    on_change: Callable[[], None],
) -> None:
    """Draw a picture in a state. `st.session_state[key].view` holds what is reported."""
    _mount(
        key=key,
        data={**picture, "state": dict(state)},
        on_view_change=on_change,
    )
