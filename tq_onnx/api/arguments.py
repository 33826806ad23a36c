"""Arguments of the public functions: from what users give to what the rooms below take."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, overload

from tq_onnx.errors import UsageError
from tq_onnx.runtime import arguments

if TYPE_CHECKING:
    from tq_onnx.runtime.providers import ExecutionProvider

AnyPath = str | PathLike[str]

LARGEST: Final = 2**31 - 1
"""Of a count: more tokens or rows than any model has."""

FORMER_NAMES: Final = {"window": "residual_length", "sinks": "sink_tokens"}
"""Parameters of public functions by the names that they had once."""

F = TypeVar("F", bound=Callable[..., Any])


def takes_former_names(function: F) -> F:
    """Return a function that takes ``FORMER_NAMES``, too, with a ``DeprecationWarning``.

    Raises:
        UsageError: a call has both names of a parameter.
    """

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        for former, name in FORMER_NAMES.items():
            if former not in named:
                continue
            if name in named:
                raise UsageError(f"{former} and {name} are one parameter", fix=f"give {name} only")
            warnings.warn(f"{former} is called {name} now", DeprecationWarning, stacklevel=2)
            named[name] = named.pop(former)
        return function(*arguments, **named)

    return call  # type: ignore[return-value]


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
