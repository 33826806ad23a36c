"""What callers give is taken as it is, or refused with the name of the parameter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tq_onnx.errors import UsageError
from tq_onnx.runtime import arguments


@pytest.mark.parametrize("value", [3, np.int8(3), np.uint64(3), np.array(3)])
def test_whole_numbers_become_ints(value: object) -> None:
    assert type(arguments.count(value, "n")) is int


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (True, "n must be a whole number, got True"),
        (np.True_, "n must be a whole number, got True"),
        (1.5, "n must be a whole number, got 1.5"),
        (float("nan"), "n must be a whole number, got nan"),
        ("3", "n must be a whole number, got '3'"),
        (None, "n must be a whole number, got None"),
        ([3], "n must be a whole number, got type list"),
        (-1, "n must be at least 0, got -1"),
        (10**9, "n must be at most 9, got 1000000000"),
        pytest.param(
            10**5000, "n must be at most 9, got a number of some 5000 digits", id="digits"
        ),
    ],
)
def test_what_is_no_count_is_refused(value: object, message: str) -> None:
    with pytest.raises(UsageError) as refusal:
        arguments.count(value, "n", most=9)
    assert str(refusal.value) == message


def test_seeds_are_those_of_the_engine() -> None:
    assert arguments.seed(2**64 - 1) == 2**64 - 1
    for value in (-1, 2**64, 2**200, 0.5, None):
        with pytest.raises(UsageError, match="seed must be "):
            arguments.seed(value)


@pytest.mark.parametrize("value", [0, 1, 0.25, np.float16(0.25), np.int32(1), 1e-30])
def test_numbers_become_floats(value: Any) -> None:
    number = arguments.real(value, "x", least=0, most=1)
    assert (type(number), number) == (float, value)


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), -1, 1.5, 1e39, 5e-324, 10**400, True, "0.5", None, 1j, [1.0]],
)
def test_what_is_no_number_of_the_range_is_refused(value: object) -> None:
    with pytest.raises(UsageError, match=r"^x must be .*, got "):
        arguments.real(value, "x", least=0, most=1)
    with pytest.raises(UsageError, match=r"x must be above 0, got 0\.0"):
        arguments.real(0, "x", above=0)


@pytest.mark.parametrize(
    "prompt",
    [
        [1, 2, 4],
        (1, np.int64(2), 4),
        np.array([1, 2, 4], np.uint8),
        range(1, 5, 1),
        iter([1, 2, 4]),
        [np.array(1), 2, 4],
    ],
    ids=["list", "tuple", "array", "range", "generator", "scalars"],
)
def test_token_ids_become_a_list_of_ints(prompt: Any) -> None:
    ids = arguments.token_ids(prompt, 5)
    assert [type(token) for token in ids] == [int] * len(ids)
    assert (ids[0], ids[-1]) == (1, 4)
    assert ids is not prompt


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty"),
        (np.array([]), "the prompt is empty"),
        ([1, 5], r"prompt\[1\] is 5, and the model knows the ids 0 to 4"),
        ([1, -1], r"prompt\[1\] is -1, and the model knows the ids 0 to 4"),
        (np.array([1, 2**31]), r"prompt\[1\] is 2147483648, and"),
        ([2**70], r"prompt\[0\] is 1180591620717411303424, and"),
        ([1, True], r"prompt\[1\] must be a token id, got True"),
        ([1.0], r"prompt\[0\] must be a token id, got 1\.0"),
        (np.array([1.0]), r"prompt\[0\] must be a token id, got 1\.0"),
        ([[1, 2]], r"prompt\[0\] must be a token id, got type list"),
        (np.array([[1, 2]]), r"prompt\[0\] must be a token id, got type list"),
        (["1"], r"prompt\[0\] must be a token id, got '1'"),
        ("text", "prompt must be a list of token ids, got 'text'"),
        (b"bytes", "prompt must be a list of token ids, got type bytes"),
        ({1: 2}, "prompt must be a list of token ids, got type dict"),
        ({1, 2}, "prompt must be a list of token ids, got type set"),
        (7, "prompt must be a list of token ids, got 7"),
        (None, "prompt must be a list of token ids, got None"),
    ],
)
def test_what_is_no_prompt_is_refused(prompt: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        arguments.token_ids(prompt, 5)


def test_negative_ids_are_refused_where_no_vocabulary_is_known() -> None:
    assert arguments.token_ids([2**40], None) == [2**40]
    with pytest.raises(UsageError, match=r"ids\[0\] is -1, and the model knows the ids from 0 on"):
        arguments.token_ids([-1], None, "ids")


@pytest.mark.parametrize(
    ("check", "value", "message"),
    [
        (arguments.text, "\ud800", "x is not valid Unicode"),
        (arguments.text, b"a", "x must be a text, got type bytes"),
        (arguments.text, "a" * 99 + "\udfff", "x is not valid Unicode"),
        (arguments.function, "a" * 99, "x must be a function, got type str"),
        (arguments.function, None, "x must be a function, got None"),
    ],
)
def test_texts_and_functions(check: Callable[..., Any], value: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check(value, "x")
    assert arguments.text("", "x") == ""
    assert arguments.function(print, "x") is print


@pytest.mark.parametrize("value", ["file", Path("file"), "~"])
def test_paths(value: Any) -> None:
    assert arguments.path(value, "x") == Path(value)


@pytest.mark.parametrize("value", ["", "a\0b", b"file", None, 5, Path("a\0b")])
def test_what_is_no_path(value: object) -> None:
    with pytest.raises(UsageError, match=r"^x (must be|is empty|has)"):
        arguments.path(value, "x")


def test_objects_are_of_a_class() -> None:
    assert arguments.instance(3, int, "x") == 3
    with pytest.raises(UsageError, match="x must be a dict, got type list"):
        arguments.instance([], dict, "x")
