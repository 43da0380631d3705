"""Tasks: what a prompt says, what its corruption changes, and what is dropped."""

from __future__ import annotations

import re
from typing import Any

import pytest

from circuitlab import tasks
from circuitlab.errors import ArgumentError, CircuitlabError, DataError
from circuitlab.prompts import Prompts
from circuitlab.tasks.agreement import NOUNS as AGREEMENT_NOUNS
from circuitlab.tasks.agreement import TEMPLATES as AGREEMENT_TEMPLATES
from circuitlab.tasks.capitals import CAPITALS
from circuitlab.tasks.capitals import TEMPLATES as CAPITAL_TEMPLATES
from circuitlab.tasks.greater_than import NOUNS as GREATER_THAN_NOUNS
from circuitlab.tasks.greater_than import TEMPLATES as GREATER_THAN_TEMPLATES
from circuitlab.tasks.induction import WORDS
from circuitlab.tasks.ioi import DISTRACTOR
from circuitlab.tasks.ioi import TEMPLATES as IOI_TEMPLATES
from circuitlab.tasks.pronouns import ROLES, TRAITS
from circuitlab.tasks.pronouns import TEMPLATES as PRONOUN_TEMPLATES
from circuitlab.tasks.words import MEN, NAMES, OBJECTS, PLACES, WOMEN
from tests.tiny_tokenizers import TWO_DIGITS, WHOLE_YEARS, word_tokenizer

ALL_TASKS = tasks.names()


def every_text() -> list[str]:
    templates = (
        *AGREEMENT_TEMPLATES,
        *CAPITAL_TEMPLATES,
        *GREATER_THAN_TEMPLATES,
        *IOI_TEMPLATES,
        *(f"{DISTRACTOR} {template}" for template in IOI_TEMPLATES),
        *PRONOUN_TEMPLATES,
    )
    words = [*NAMES, *PLACES, *OBJECTS, *TRAITS, *ROLES, *WORDS, *GREATER_THAN_NOUNS]
    words += [form for n in AGREEMENT_NOUNS for form in (n, n + "s", n + "es")]
    words += [*CAPITALS, *CAPITALS.values(), *["he", "she", "is", "was", "are", "were"]]
    return [
        *(re.sub(r" ?\{\w+\}", "", template) for template in templates),
        *(f" {word}" for word in words),
        *(str(digit) for digit in range(10)),
        " ",
    ]


@pytest.fixture(scope="module")
def one_digit():
    return word_tokenizer(every_text())


@pytest.fixture(scope="module")
def two_digits():
    pairs = [f"{space}{i:02d}" for i in range(100) for space in ("", " ")]
    return word_tokenizer([*every_text(), *pairs], TWO_DIGITS)


def texts(prompts: Prompts) -> list[tuple[str, str]]:
    columns = (prompts.table[c].to_pylist() for c in ("clean", "corrupted"))
    return list(zip(*columns, strict=True))


def names_in(text: str) -> list[str]:
    return [word for word in re.findall(r"[A-Z][a-z]+", text) if word in NAMES]


@pytest.mark.parametrize("task", ALL_TASKS)
def test_every_task_makes_checked_distinct_pairs(one_digit, task):
    n = 60 if task == "capitals" else 200
    prompts = tasks.by_name(task)(n, seed=3, model=one_digit)
    assert len(prompts) == len(set(prompts.clean)) == n
    prompts.require_equal_lengths()
    assert all(a != b for a, b in zip(prompts.clean, prompts.corrupted, strict=True))
    for right, wrong in zip(prompts.answers, prompts.wrong_answers, strict=True):
        assert right
        assert wrong
        assert {len(answer) for answer in right + wrong} == {1}
        assert not set(right) & set(wrong)
    assert (prompts.name, prompts.seed, prompts.prepend_bos) == (task, 3, False)
    assert one_digit.unk_token_id not in {
        token for row in prompts.clean for token in row
    }


@pytest.mark.parametrize("task", ALL_TASKS)
def test_a_seed_decides_everything(one_digit, task):
    make = tasks.by_name(task)
    assert make(16, 0, one_digit).digest == make(16, 0, one_digit).digest
    assert make(16, 0, one_digit).digest != make(16, 1, one_digit).digest
    assert make(24, 0, one_digit)[:16].digest == make(16, 0, one_digit).digest


@pytest.mark.parametrize("task", ALL_TASKS)
def test_bos_is_asked_for(one_digit, task):
    prompts = tasks.by_name(task)(4, 0, one_digit, prepend_bos=True)
    assert {row[0] for row in prompts.clean + prompts.corrupted} == {
        one_digit.bos_token_id
    }


@pytest.mark.parametrize("order", ["abba", "baba", "mixed"])
def test_ioi_asks_for_the_name_that_is_not_repeated(one_digit, order):
    prompts = tasks.ioi(40, 0, one_digit, order=order)
    seen = set()
    rows = zip(texts(prompts), prompts.table["answer_texts"].to_pylist(), strict=True)
    for (clean, _), (answer,) in rows:
        first, second, third = names_in(clean)
        seen.add("abba" if third == second else "baba")
        assert {first, second} - {third} == {answer.strip()}
    assert seen == ({"abba", "baba"} if order == "mixed" else {order})


def _is_abc(clean, corrupted):
    return len(set(corrupted)) == 3 and not set(clean) & set(corrupted)


def _is_s2_random(clean, corrupted):
    return corrupted[:2] == clean[:2] and corrupted[2] not in clean


def _is_random_names(clean, corrupted):
    same_roles = [name == clean[2] for name in clean]
    roles = [name == corrupted[2] for name in corrupted]
    return roles == same_roles and not set(clean) & set(corrupted)


def _is_s2_io_flip(clean, corrupted):
    return corrupted[:2] == clean[:2] and {clean[2], corrupted[2]} == set(clean)


def _is_s1_io_flip(clean, corrupted):
    return corrupted == [clean[1], clean[0], clean[2]]


@pytest.mark.parametrize(
    ("corruption", "holds"),
    [
        ("abc", _is_abc),
        ("s2_random", _is_s2_random),
        ("random_names", _is_random_names),
        ("s2_io_flip", _is_s2_io_flip),
        ("s1_io_flip", _is_s1_io_flip),
    ],
)
def test_ioi_corruptions_change_names_only(one_digit, corruption, holds):
    for clean, corrupted in texts(tasks.ioi(40, 1, one_digit, corruption)):
        assert holds(names_in(clean), names_in(corrupted))
        blank = lambda text: re.sub("|".join(NAMES), "X", text)
        assert blank(clean) == blank(corrupted)


def test_a_distractor_makes_counting_useless(one_digit):
    prompts = tasks.ioi(120, 0, one_digit, distractor=True)
    extra = set()
    answers = prompts.table["answer_texts"].to_pylist()
    for (clean, _), (answer,) in zip(texts(prompts), answers, strict=True):
        mentioned, first, second, third = names_in(clean)
        role = {answer.strip(): "io", third: "s"}.get(mentioned, "third")
        extra.add(role)
        assert {first, second} - {third} == {answer.strip()}
    assert extra == {"io", "s", "third"}


def test_unknown_choices_of_ioi_are_refused(one_digit):
    choices: list[tuple[dict[str, Any], str]] = [
        ({"corruption": "xyz"}, "corruption_unknown"),
        ({"order": "aabb"}, "order_unknown"),
    ]
    for options, code in choices:
        with pytest.raises(ArgumentError) as caught:
            tasks.ioi(4, 0, one_digit, **options)
        assert caught.value.code == code


@pytest.mark.parametrize("digits", [1, 2])
def test_greater_than_adapts_to_the_digits_of_a_token(one_digit, two_digits, digits):
    tokenizer = (one_digit, two_digits)[digits - 1]
    prompts = tasks.greater_than(60, 0, tokenizer)
    columns = (
        prompts.table[c].to_pylist() for c in ("answer_texts", "wrong_answer_texts")
    )
    for (clean, corrupted), later, earlier in zip(
        texts(prompts), *columns, strict=True
    ):
        year = re.findall(r"\d{4}", clean)[0]
        start = re.findall(r"\d+$", clean)[0]
        assert year[: len(start)] == start
        assert len(year) - len(start) == digits
        end = year[-digits:]
        assert set(later) | set(earlier) | {end} == {
            f"{i:0{digits}d}" for i in range(10**digits)
        }
        assert all(int(x) > int(end) for x in later)
        assert all(int(x) < int(end) for x in earlier)
        least = "0" if digits == 1 else "01"
        assert corrupted == clean.replace(year, year[:-digits] + least)


def test_greater_than_refuses_years_that_are_one_token():
    years = [f" {year}" for year in range(1000, 2000)]
    tokenizer = word_tokenizer([*every_text(), *years], WHOLE_YEARS)
    with pytest.raises(DataError) as caught:
        tasks.greater_than(4, 0, tokenizer)
    assert caught.value.code == "task_needs_digits"
    assert " 1732" in str(caught.value)


def test_induction_repeats_at_no_fixed_distance(one_digit):
    prompts = tasks.induction(80, 0, one_digit)
    distances = set()
    for clean, corrupted, right in zip(
        prompts.clean, prompts.corrupted, prompts.answers, strict=True
    ):
        at = clean.index(clean[-1])
        assert clean[at + 1] == right[0][0]
        distances.add(len(clean) - 1 - at)
        assert right[0][0] not in corrupted
        assert corrupted.count(corrupted[-1]) == 1
    assert len(distances) > 2


def test_pronouns_follow_the_name(one_digit):
    prompts = tasks.pronouns(60, 0, one_digit)
    rows = zip(texts(prompts), prompts.table["answer_texts"].to_pylist(), strict=True)
    for (clean, corrupted), (answer,) in rows:
        (name,), (other,) = names_in(clean), names_in(corrupted)
        assert (name in MEN) == (other in WOMEN) == (answer == " he")


def test_agreement_changes_the_subject_and_keeps_the_second_noun(one_digit):
    prompts = tasks.agreement(60, 0, one_digit)
    rows = zip(texts(prompts), prompts.table["answer_texts"].to_pylist(), strict=True)
    for (clean, corrupted), answers in rows:
        a, b = clean.split(), corrupted.split()
        changed = [pair for pair in zip(a, b, strict=True) if pair[0] != pair[1]]
        ((subject, other),) = changed
        assert a[-1] == b[-1]
        plural = len(subject) > len(other)
        assert answers == ([" are", " were"] if plural else [" is", " was"])


def test_words_outside_the_vocabulary_are_dropped_and_counted():
    known = [text for text in every_text() if text not in (" Mary", " John", " Tom")]
    tokenizer = word_tokenizer([text for text in known if "handed" not in text])
    prompts = tasks.ioi(60, 0, tokenizer)
    dropped = dict(prompts.dropped)
    assert dropped["name: not one known token"] == 3
    assert dropped["template: words outside the vocabulary"] == 1
    said = " ".join(clean for clean, _ in texts(prompts))
    assert not {"Mary", "John", "Tom"} & set(names_in(said))
    assert "handed" not in said


def test_pairs_that_are_drawn_twice_are_counted(one_digit):
    dropped = dict(tasks.capitals(90, 0, one_digit).dropped)
    assert dropped["pair: drawn before"] > 0


@pytest.mark.parametrize("task", ALL_TASKS)
def test_a_vocabulary_that_is_too_small_is_refused(task):
    tokenizer = word_tokenizer([" Mary", " John", " he", "0", "1"])
    with pytest.raises(DataError) as caught:
        tasks.by_name(task)(4, 0, tokenizer)
    assert caught.value.code == "task_too_small"
    assert caught.value.fields["dropped"]


def test_more_prompts_than_a_task_has_are_refused_with_how_many_there_are(one_digit):
    with pytest.raises(DataError) as caught:
        tasks.capitals(3000, 0, one_digit)
    error = caught.value
    assert error.code == "task_too_small"
    assert error.fields["expected"] == 3000
    assert f"n={error.fields['value']}" in str(error)


def test_bad_arguments_are_refused(one_digit):
    for call, code in (
        (lambda: tasks.ioi(0, 0, one_digit), "task_size_invalid"),
        (lambda: tasks.ioi(4, 0), "tokenizer_missing"),
        (
            lambda: tasks.induction(4, 0, one_digit, longest=2),
            "induction_length_invalid",
        ),
        (lambda: tasks.by_name("pronoun"), "task_unknown"),
    ):
        with pytest.raises(CircuitlabError) as caught:
            call()
        assert caught.value.code == code


def test_tasks_are_found_by_name_in_either_spelling():
    assert tasks.by_name("greater-than") is tasks.greater_than
    assert all(tasks.by_name(name) is getattr(tasks, name) for name in ALL_TASKS)
    with pytest.raises(ArgumentError, match="did you mean pronouns"):
        tasks.by_name("pronoun")


@pytest.mark.real_model
def test_every_task_works_with_a_real_tokenizer(smollm2):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    for name in ALL_TASKS:
        prompts = tasks.by_name(name)(50, 0, tokenizer)
        assert not prompts.prepend_bos
        prompts.require_equal_lengths()
        assert {len(ids) for row in prompts.answers for ids in row} == {1}
