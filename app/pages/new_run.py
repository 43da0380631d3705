"""new_run."""

from __future__ import annotations

import ui

ui.page("new_run")
