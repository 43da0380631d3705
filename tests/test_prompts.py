"""Prompts: what goes in comes out, and what can't be used is refused by name."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from circuitlab.encoding import Encoder
from circuitlab.errors import ArgumentError, CircuitlabError, DataError
from circuitlab.prompts import Prompts, PromptText
from circuitlab.tables import PROMPT
from tests.tiny_tokenizers import spaced_tokenizer, word_tokenizer

TEXTS = ["When Mary and John met, John smiled at", " Mary", " Tom", " he", " she"]

ROWS = [
    {
        "clean": "When Mary and John met, John smiled at",
        "corrupted": "When Mary and John met, Tom smiled at",
        "answer": " Mary",
        "wrong_answer": [" John", " Tom"],
        "note": "ignored",
    },
    {
        "clean": "When Tom and John met, Tom smiled at",
        "corrupted": "When Tom and John met, Mary smiled at",
        "answer": [" John"],
        "wrong_answer": " Tom",
        "note": "",
    },
]


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer(TEXTS)


def numbered(n: int) -> Prompts:
    rows = [[i, i + 1] for i in range(n)]
    return Prompts.from_tokens(rows, rows, list(range(n)), list(range(n)))


def write(path, rows):
    if path.suffix == ".csv":
        cell = lambda v: json.dumps(v) if isinstance(v, list) else v
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows([{k: cell(v) for k, v in row.items()} for row in rows])
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        as_list = lambda v: v if isinstance(v, list) else [v]
        keys = ("answer", "wrong_answer")
        listed = [r | {key: as_list(r[key]) for key in keys} for r in rows]
        pq.write_table(pa.Table.from_pylist(listed), path)
    return path


def refusal(code: str, call) -> CircuitlabError:
    with pytest.raises(CircuitlabError) as caught:
        call()
    assert caught.value.code == code
    assert caught.value.fields["code"] == code
    return caught.value


def test_tensors_arrays_and_lists_give_the_same_prompts():
    clean, corrupted = [[1, 2, 3], [4, 5, 6]], [[1, 9, 3], [4, 9, 6]]
    kinds = (torch.tensor, np.array, list)
    made = [
        Prompts.from_tokens(k(clean), k(corrupted), k([7, 8]), k([9, 10]))
        for k in kinds
    ]
    assert made[0].clean == ((1, 2, 3), (4, 5, 6))
    assert made[0].answers == (((7,),), ((8,),))
    assert made[0].table.schema == PROMPT
    assert {p.digest for p in made} == {made[0].digest}


def test_answers_may_be_sets_and_several_tokens_and_rows_ragged():
    prompts = Prompts.from_tokens(
        [[1, 2, 3], [4]], [[1], [4, 4]], [{8, 7}, [[5, 6], [7]]], [[1, 2], 3]
    )
    assert prompts.answers == (((7,), (8,)), ((5, 6), (7,)))
    assert prompts.wrong_answers == (((1,), (2,)), ((3,),))
    assert prompts.clean == ((1, 2, 3), (4,))


def test_answers_may_be_left_out():
    prompts = Prompts.from_tokens([[1]], [[2]])
    assert prompts.answers == prompts.wrong_answers == ((),)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (([], [], [], []), "prompts_empty"),
        (([[1], [2]], [[1]], [1, 2], [1, 2]), "prompt_counts_differ"),
        (([[1], [2]], [[1], [2]], [1], [1, 2]), "prompt_counts_differ"),
        (([[1.5]], [[1]], [1], [1]), "prompt_tokens_invalid"),
        (([[True]], [[1]], [1], [1]), "prompt_tokens_invalid"),
        (([[]], [[1]], [1], [1]), "prompt_tokens_invalid"),
        (([1, 2], [1, 2], [1, 2], [1, 2]), "prompt_tokens_invalid"),
        (([["a"]], [[1]], [1], [1]), "prompt_tokens_invalid"),
        (([[1]], [[1]], ["a"], [1]), "prompt_tokens_invalid"),
    ],
)
def test_token_input_that_is_refused(arguments, code):
    assert isinstance(refusal(code, lambda: Prompts.from_tokens(*arguments)), DataError)


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_every_file_format_reads_the_same(tmp_path, tokenizer, ending):
    path = write(tmp_path / f"pairs.{ending}", ROWS)
    prompts = Prompts.from_file(path, tokenizer)
    texts = [PromptText(r["clean"], r["corrupted"], (), ()) for r in ROWS]
    ids = tokenizer.convert_tokens_to_ids
    assert prompts.name == "pairs"
    assert prompts.table["clean"].to_pylist() == [t.clean for t in texts]
    assert prompts.answers == (((ids(" Mary"),),), ((ids(" John"),),))
    assert prompts.wrong_answers[0] == ((ids(" John"),), (ids(" Tom"),))
    pieces = prompts.table["clean_token_texts"].to_pylist()
    assert ["".join(row) for row in pieces] == [t.clean for t in texts]
    assert "note" not in prompts.to_pandas().columns


def test_text_is_taken_literally(tmp_path, tokenizer):
    bracket = [ROWS[0] | {"answer": " Mary", "wrong_answer": "["}]
    path = write(tmp_path / "p.csv", bracket)
    known = word_tokenizer([*TEXTS, "["])
    assert Prompts.from_file(path, known).table["wrong_answer_texts"][0].as_py() == [
        "["
    ]
    spaceless = write(tmp_path / "q.jsonl", [ROWS[0] | {"answer": "Mary"}])
    refusal("prompt_words_unknown", lambda: Prompts.from_file(spaceless, tokenizer))


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("none.csv", None, "prompts_file_missing"),
        ("a.txt", "x", "prompts_file_unreadable"),
        ("a.jsonl", "{not json}\n", "prompts_file_unreadable"),
        ("a.jsonl", "[1]\n", "prompts_file_unreadable"),
        ("a.parquet", "no parquet", "prompts_file_unreadable"),
        ("a.csv", "clean,corrupted,answer\na,b,c\n", "prompts_column_missing"),
        ("a.jsonl", '{"clean": "a"}\n', "prompts_column_missing"),
        ("a.csv", "clean,corrupted,answer,wrong_answer\n", "prompts_empty"),
        ("a.jsonl", "\n", "prompts_empty"),
        (
            "a.csv",
            "clean,corrupted,answer,wrong_answer\na,,c,d\n",
            "prompts_row_invalid",
        ),
        ("a.csv", "clean,corrupted,answer,wrong_answer\na,b\n", "prompts_row_invalid"),
        (
            "a.csv",
            "clean,corrupted,answer,wrong_answer\na,b,[],d\n",
            "prompts_row_invalid",
        ),
    ],
)
def test_files_that_are_refused(tmp_path, tokenizer, name, content, code):
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    error = refusal(code, lambda: Prompts.from_file(path, tokenizer))
    assert name in str(error)


def test_bytes_that_are_no_text_are_refused(tmp_path, tokenizer):
    path = tmp_path / "a.csv"
    path.write_bytes(b"clean,corrupted,answer,wrong_answer\n\xff\xfe,a,b,c\n")
    refusal("prompts_file_unreadable", lambda: Prompts.from_file(path, tokenizer))


def test_an_answer_of_several_tokens_shows_its_pieces(tmp_path, tokenizer):
    path = write(tmp_path / "p.jsonl", [ROWS[0] | {"answer": " Mary smiled"}])
    error = refusal(
        "answer_not_single_token", lambda: Prompts.from_file(path, tokenizer)
    )
    assert error.fields["pieces"] == (" Mary", " smiled")
    assert "' Mary', ' smiled'" in str(error)
    prompts = Prompts.from_file(path, tokenizer, multi_token_answers=True)
    assert [len(answer) for answer in prompts.answers[0]] == [2]


def test_unequal_lengths_are_kept_and_refused_for_patching_only(tmp_path, tokenizer):
    longer = ROWS[1] | {"corrupted": "When Tom and John met, Mary and John smiled at"}
    path = write(tmp_path / "p.jsonl", [ROWS[0], longer])
    prompts = Prompts.from_file(path, tokenizer)
    error = refusal("prompt_lengths_differ", prompts.require_equal_lengths)
    assert error.fields["row"] == 1
    assert (error.fields["clean"], error.fields["corrupted"]) == (9, 11)
    prompts[:1].require_equal_lengths()


def test_text_without_a_tokenizer_is_refused(tmp_path):
    path = write(tmp_path / "p.jsonl", ROWS)
    model = SimpleNamespace(tokenizer=None)
    error = refusal("tokenizer_missing", lambda: Prompts.from_file(path, model))
    assert isinstance(error, ArgumentError)


def test_bos_is_what_a_fresh_tokenizer_does(tmp_path):
    path = write(tmp_path / "p.jsonl", ROWS)
    plain, adds = word_tokenizer(TEXTS), word_tokenizer(TEXTS, bos=True)
    bos = adds.bos_token_id
    without = Prompts.from_file(path, plain)
    with_bos = Prompts.from_file(path, adds)
    assert not without.prepend_bos
    assert with_bos.prepend_bos
    assert with_bos.clean == tuple((bos, *row) for row in without.clean)
    assert with_bos.answers == without.answers
    assert with_bos.digest != without.digest
    forced = Prompts.from_file(path, plain, prepend_bos=True)
    assert forced.clean == with_bos.clean
    assert Prompts.from_file(path, adds, prepend_bos=False).clean == without.clean


def test_a_backend_that_changed_its_tokenizer_says_so(tmp_path):
    path = write(tmp_path / "p.jsonl", ROWS)
    changed = SimpleNamespace(tokenizer=word_tokenizer(TEXTS, bos=True), adds_bos=False)
    assert not Prompts.from_file(path, changed).prepend_bos


def test_a_model_that_made_its_tokenizer_add_bos_is_seen_through(tmp_path):
    path = write(tmp_path / "p.jsonl", ROWS)
    for adds in (False, True):
        folder = tmp_path / str(adds)
        word_tokenizer(TEXTS, bos=adds).save_pretrained(folder)
        fresh = PreTrainedTokenizerFast.from_pretrained(folder)
        changed = PreTrainedTokenizerFast.from_pretrained(folder, add_bos_token=True)
        changed.backend_tokenizer.post_processor = word_tokenizer(
            TEXTS, bos=True
        ).backend_tokenizer.post_processor
        assert fresh.encode(" he")[0] == fresh.bos_token_id or not adds
        assert changed.encode(" he")[0] == changed.bos_token_id
        bridge = SimpleNamespace(tokenizer=changed)
        assert Prompts.from_file(path, bridge).prepend_bos is adds
        assert Prompts.from_file(path, changed).prepend_bos


def test_bos_without_a_bos_token_is_refused(tmp_path):
    path = write(tmp_path / "p.jsonl", ROWS)
    tokenizer = spaced_tokenizer(["Mary"])
    refusal(
        "bos_token_missing",
        lambda: Prompts.from_file(path, tokenizer, prepend_bos=True),
    )


def test_answers_follow_the_prompt_where_a_tokenizer_adds_its_own_space():
    encoder = Encoder.of(spaced_tokenizer(["one", "two", "gave", "to", "Mary"]))
    assert len(encoder.ids(" Mary")) == 2
    assert encoder.answer("gave to", " Mary") == encoder.ids("Mary")
    assert encoder.single(" Mary")


@given(
    rows=st.lists(
        st.lists(st.integers(0, 50), min_size=1, max_size=4), min_size=2, max_size=12
    ),
    seed=st.integers(0, 5),
    data=st.data(),
)
def test_a_split_is_a_permutation_and_repeatable(rows, seed, data):
    prompts = Prompts.from_tokens(rows, rows, [1] * len(rows), [2] * len(rows))
    n = data.draw(st.integers(1, len(rows) - 1))
    first, rest = prompts.split(n, seed)
    assert len(first) == n
    assert sorted(first.clean + rest.clean) == sorted(prompts.clean)
    again, _ = prompts.split(n, seed)
    assert again.digest == first.digest
    assert first.table["prompt"].to_pylist() == list(range(n))


@pytest.mark.parametrize("n", [0, 4, -1, 9])
def test_a_split_out_of_range_is_refused(n):
    error = refusal("prompts_k_out_of_range", lambda: numbered(4).split(n))
    assert error.fields["expected"] == "1..3"


def test_batches_and_slices_partition_in_order():
    prompts = numbered(7)
    batches = list(prompts.batches(3))
    assert [len(b) for b in batches] == [3, 3, 1]
    assert sum((b.clean for b in batches), ()) == prompts.clean
    assert prompts[2:5].clean == prompts.clean[2:5]
    assert prompts[::-1].answers == prompts.answers[::-1]
    refusal("batch_size_invalid", lambda: list(prompts.batches(0)))
    refusal("prompts_empty", lambda: prompts[7:])
    refusal("prompts_index_invalid", lambda: prompts[0])  # type: ignore[reportArgumentType]


def test_the_digest_is_of_the_data_and_not_of_names():
    rows = [[1, 2], [3, 4]]
    base = Prompts.from_tokens(rows, rows, [1, 2], [3, 4])
    renamed = Prompts.from_tokens(rows, rows, [1, 2], [3, 4], name="other")
    other = Prompts.from_tokens(rows, rows, [1, 2], [3, 5])
    assert base.digest == renamed.digest
    assert len({base.digest, other.digest, base[:1].digest, base[::-1].digest}) == 4


def test_overlap_counts_shared_clean_prompts():
    prompts = numbered(6)
    assert prompts[:4].overlaps(prompts[2:]) == 2
    first, rest = prompts.split(3)
    assert first.overlaps(rest) == 0
    assert prompts.overlaps(prompts) == 6


def test_the_notebook_view_escapes_text_and_names_what_was_dropped():
    encoder = Encoder.of(word_tokenizer([*TEXTS, "<b>"]))
    row = PromptText("<b>", "<b>", (" Mary",), (" John",))
    prompts = replace(Prompts.from_texts([row], encoder), dropped=(("a & b", 3),))
    page = prompts._repr_html_()
    assert "&lt;b&gt;" in page
    assert "3 dropped: a &amp; b" in page
    assert "<b>" not in page
    assert "1 prompt pair," in page
    assert "2 prompt pairs" in numbered(2)._repr_html_()


def test_a_foreign_table_is_refused():
    table = pa.table({"clean": ["a"]})
    refusal("prompt_table_schema_invalid", lambda: Prompts(table))
