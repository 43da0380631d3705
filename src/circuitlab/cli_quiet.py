"""Loading a model from the command line: no bars and notices of other packages."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from circuitlab.backends import Backend


def quiet_load(spec: str, **options: Any) -> Backend:
    """`circuitlab.load_model`, quietly; a terminal is told that it takes a moment."""
    from rich.console import Console

    console = Console(stderr=True)
    if not sys.stderr.isatty():
        return _load(spec, options)
    with console.status(f"Loading {spec} …"):
        return _load(spec, options)


def _load(spec: str, options: dict[str, Any]) -> Backend:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers.utils.logging as notices

        from circuitlab.backends import load_model

        notices.disable_progress_bar()
        for package in ("transformer_lens", "huggingface_hub"):
            logging.getLogger(package).setLevel(logging.ERROR)
        return load_model(spec, **options)
