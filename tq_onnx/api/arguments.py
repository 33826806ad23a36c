"""Arguments of the public functions: from what users give to what the rooms below take."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Final, overload

from tq_onnx.errors import UsageError
from tq_onnx.runtime import arguments

if TYPE_CHECKING:
    from tq_onnx.runtime.providers import ExecutionProvider

AnyPath = str | PathLike[str]

LARGEST: Final = 2**31 - 1
"""Of a count: more tokens or rows than any model has."""


@overload
def path_of(path: AnyPath) -> Path: ...
@overload
def path_of(path: AnyPath | None) -> Path | None: ...
def path_of(path: AnyPath | None) -> Path | None:
    """Return a path that may be left out as a ``Path``.

    Raises:
        UsageError: it is none, or empty, which ``Path`` would take for the current folder.
    """
    return None if path is None else arguments.path(path, "a path")


def provider_of(name: str) -> ExecutionProvider:
    """Return the execution provider of a name.

    Raises:
        UsageError: there is none.
    """
    from tq_onnx.runtime.providers import PROVIDERS

    if name not in PROVIDERS:
        raise UsageError(f"execution provider {name!r} is not one of {', '.join(PROVIDERS)}")
    return PROVIDERS[name]


def at_least(least: int, **values: int | None) -> None:
    """Refuse counts that are too small, or larger than any model or machine has.

    Raises:
        UsageError: a value is no whole number, or not from ``least`` to ``LARGEST``; None may be.
    """
    within(least, LARGEST, **values)


def within(least: int, most: int, **values: int | None) -> None:
    """Refuse what is not a whole number within bounds.

    Raises:
        UsageError: a value is no whole number, or not from ``least`` to ``most``; None may be.
    """
    for name, value in values.items():
        if value is not None:
            arguments.count(value, name, least=least, most=most)
