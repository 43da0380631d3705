"""The circuit browser: `circuitlab app`, or `streamlit run main.py -- STORE`."""

from __future__ import annotations

from pathlib import Path

import streamlit as st
from navigation import navigation

ICON = str(Path(__file__).with_name("icon.svg"))
STYLE = """<style>
.stMainBlockContainer { padding: 3.9rem 2.2rem 2rem; }
</style>"""

# A Material icon here would be fetched from outside; this one is served from here.
st.set_page_config(page_title="circuitlab", page_icon=ICON, layout="wide")
page = navigation()
st.html(STYLE)
page.run()
