"""Check arguments of callers before any computation.

Every function takes a value of any type and the name of its parameter, and returns the value as the
code below may use it. A refusal names the parameter, the value and what is allowed.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Mapping, Set
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from tq_onnx.errors import UsageError

LAST_SEED: Final = 2**64 - 1
"""The largest seed that onnxruntime-genai takes."""
MAX_THREADS: Final = 1024
"""ONNX Runtime starts any number, until the machine takes no more."""
_SMALLEST: Final = float(np.finfo(np.float32).tiny)
_LARGEST: Final = float(np.finfo(np.float32).max)
_T = TypeVar("_T")
_MOST_SHOWN: Final = 40
"""Digits or characters of a value in a message."""


def count(value: object, name: str, *, least: int = 0, most: int | None = None) -> int:
    """Return a whole number, which True and False are not."""
    number = _integer(value)
    if number is None:
        raise UsageError(f"{name} must be a whole number, got {_shown(value)}")
    if number < least:
        raise UsageError(f"{name} must be at least {least}, got {_shown(number)}")
    if most is not None and number > most:
        raise UsageError(f"{name} must be at most {most}, got {_shown(number)}")
    return number


def seed(value: object, name: str = "seed") -> int:
    """Return a seed, 0 to 2^64 - 1."""
    return count(value, name, most=LAST_SEED)


def thread_count(value: object, name: str = "threads") -> int | None:
    """Return a number of threads, 1 to ``MAX_THREADS``; None for the choice of ONNX Runtime."""
    return None if value is None else count(value, name, least=1, most=MAX_THREADS)


def real(
    value: object,
    name: str,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
) -> float:
    """Return a number that float32 holds, too: finite, and not so small that it is 0 there."""
    is_flag = isinstance(value, (bool, np.bool_))
    if is_flag or not isinstance(value, (int, float, np.integer, np.floating)):
        raise UsageError(f"{name} must be a number, got {_shown(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = float("inf")
    if not (number == 0 or _SMALLEST <= abs(number) <= _LARGEST):
        raise UsageError(f"{name} must be a number that float32 holds, got {_shown(value)}")
    if least is not None and number < least:
        raise UsageError(f"{name} must be at least {least}, got {number}")
    if above is not None and number <= above:
        raise UsageError(f"{name} must be above {above}, got {number}")
    if most is not None and number > most:
        raise UsageError(f"{name} must be at most {most}, got {number}")
    return number


def token_ids(prompt: object, vocabulary: int | None, name: str = "prompt") -> list[int]:
    """Return the token ids of a prompt.

    Args:
        prompt: whole numbers in a list, an array ``[T]``, a generator or the like.
    """
    if isinstance(prompt, (str, bytes, bytearray, Mapping, Set)) or not isinstance(
        prompt, Iterable
    ):
        raise UsageError(f"{name} must be a list of token ids, got {_shown(prompt)}")
    values = prompt.tolist() if isinstance(prompt, np.ndarray) and prompt.ndim else list(prompt)
    if not values:
        raise UsageError(f"the {name} is empty", fix="give at least one token")
    last = None if vocabulary is None else vocabulary - 1
    plain = all(type(value) is int for value in values)
    if plain and min(values) >= 0 and (last is None or max(values) <= last):
        return values
    ids = []
    for place, value in enumerate(values):
        number = _integer(value)
        if number is None:
            raise UsageError(f"{name}[{place}] must be a token id, got {_shown(value)}")
        if number < 0 or (last is not None and number > last):
            known = "from 0 on" if last is None else f"0 to {last}"
            raise UsageError(
                f"{name}[{place}] is {_shown(number)}, and the model knows the ids {known}",
                fix="give the tokenizer that belongs to the model",
            )
        ids.append(number)
    return ids


def text(value: object, name: str) -> str:
    """Return a text of valid Unicode, which may be empty."""
    if not isinstance(value, str):
        raise UsageError(f"{name} must be a text, got {_shown(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(f"{name} is not valid Unicode", fix="pass it as UTF-8") from error
    return value


def instance(value: object, kind: type[_T], name: str) -> _T:
    """Return an object of a class."""
    if not isinstance(value, kind):
        raise UsageError(f"{name} must be a {kind.__name__}, got {_shown(value)}")
    return value


def path(value: object, name: str) -> Path:
    """Return a path, which may not be empty: ``Path`` takes that for the current folder."""
    try:
        text = os.fspath(value)  # type: ignore[call-overload]
    except TypeError:
        text = None
    if not isinstance(text, str):
        raise UsageError(f"{name} must be a path, got {_shown(value)}")
    if not text or "\0" in text:
        reason = "is empty" if not text else "has a zero byte"
        raise UsageError(f"{name} {reason}", fix="name a file, or . for the current folder")
    return Path(text)


def function(value: object, name: str) -> Callable[..., Any]:
    """Return what can be called."""
    if not callable(value):
        raise UsageError(f"{name} must be a function, got {_shown(value)}")
    return value


def _integer(value: object) -> int | None:
    """Return a whole number as an int; None if it is no such number, or a truth value."""
    if isinstance(value, (bool, np.bool_)):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def _shown(value: object) -> str:
    """Return a value for a message: a number or a short text as it is, else its type."""
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        # Python writes no number of more than 4,300 digits.
        digits = int(value).bit_length() * 0.30103
        return f"a number of some {int(digits)} digits" if digits > _MOST_SHOWN else str(value)
    if value is None or isinstance(value, (bool, float, np.bool_, np.floating)):
        return str(value)
    if isinstance(value, str) and len(value) <= _MOST_SHOWN:
        return ascii(value)
    return f"type {type(value).__name__}"
