"""validate."""

from __future__ import annotations

import ui

ui.page("validate")
