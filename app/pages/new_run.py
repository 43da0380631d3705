"""New run: score a model's edges in a worker, and follow it."""

from __future__ import annotations

import forms
import jobs
import streamlit as st
import ui

path, _, _ = ui.page(
    "New run", "Scores every edge of a model on a task, in a process of its own."
)

left, right = st.columns([1.7, 1])
with left, st.form("new-run"):
    model = st.text_input(
        "Model",
        "embedded",
        help="`embedded`, the small model that comes with circuitlab, or a hub name.",
    )
    a, b = st.columns(2)
    task = a.selectbox("Task", forms.tasks())
    file = b.file_uploader(
        "… or prompts of your own", type=["csv", "jsonl", "parquet"], max_upload_size=64
    )
    a, b, c = st.columns(3)
    method = a.selectbox("Method", ["eap-ig", "eap", "clean-corrupted"])
    steps = b.number_input("Steps of EAP-IG", 1, 100, 5)
    metric = c.selectbox("Metric", ["logit_diff", "prob_diff", "answer_logprob", "kl"])
    a, b, c = st.columns(3)
    ablation = a.selectbox(
        "Corrupted edges carry",
        ["patch", "mean", "mean_positional", "zero", "resample"],
    )
    n = b.number_input("Prompts", 1, 100_000, 32)
    seed = c.number_input("Seed", 0, 2**31 - 1, 0)
    begun = st.form_submit_button(
        "Start", type="primary", icon=":material/play_arrow:", width="stretch"
    )

if begun:
    with ui.guarded():
        prompts = ["--task", task]
        if file is not None:
            prompts = ["--file", forms.keep_upload(path, file.name, file.getvalue())]
        arguments = ["score", forms.model_name(model), *prompts, "--method", method]
        arguments += ["--steps", str(steps), "--metric", metric, "--ablation", ablation]
        arguments += ["--n", str(n), "--seed", str(seed)]
    jobs.begin(path, f"score {model} on {file.name if file else task}", arguments)

with left:
    jobs.show(path, forms.scored)
with right:
    st.markdown("##### Jobs")
    jobs.recent(path)
