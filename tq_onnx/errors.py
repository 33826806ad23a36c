"""Define the only exception tree of tq-onnx.

Every error says what is wrong, where (file, node or layer) and what to do, in one sentence or two.
The command line prints ``str(error)`` and exits with ``error.exit_code``; nothing else ever
reaches a user's terminal.

Exit codes (documented in the README):

====  ==========================================================================
0     success
1     an unexpected internal error (a defect: please report it)
2     bad usage: an unknown option or an argument of the wrong form
3     the model is refused: not a decoder we can convert, or already converted
4     a file problem: missing, unreadable, not a model, or an output that exists
5     a check did not hold: ``verify`` found a difference
====  ==========================================================================
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike, fspath


class TqOnnxError(Exception):
    """Base of all errors that a user may see.

    Args:
        what: what is wrong, as a clause without a full stop.
        where: the file, node or layer; empty when the message is about the call itself.
        fix: what the user can do about it; empty when there is nothing to do.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what = what
        self.where = where
        self.fix = fix
        super().__init__(self._sentence())

    def _sentence(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}; {self.fix}" if self.fix else text

    def locate(self, path: str | PathLike[str]) -> None:
        """Name the file that the error is about, in front of the place that is named already."""
        file = fspath(path)
        if not self.where.startswith(file):
            self.where = f"{file}: {self.where}" if self.where else file
            self.args = (self._sentence(),)


class UsageError(TqOnnxError):
    """An option or argument that cannot be used as given."""

    exit_code = 2


class UnsupportedModelError(TqOnnxError):
    """The model is refused: something in it is not recognised or cannot be converted."""

    exit_code = 3


class AlreadyConvertedError(UnsupportedModelError):
    """The model's caches are TurboQuant caches already."""


class ModelFileError(TqOnnxError):
    """A file is missing, unreadable, not a model, or outside of where it may be."""

    exit_code = 4


class OutputExistsError(ModelFileError):
    """The output would overwrite something that exists."""


class LibraryError(ModelFileError):
    """The custom-operator library is missing, or was built for another row layout."""


class VerificationError(TqOnnxError):
    """A converted model does not behave as promised."""

    exit_code = 5


class EngineError(TqOnnxError):
    """The engine that computes many texts at a time has failed, or was closed."""


@contextmanager
def located(path: str | PathLike[str]) -> Iterator[None]:
    """Name a file in every error that is raised inside.

    A ``UsageError`` is about the call and stays as it is.

    Args:
        path: the file, as the user named it.
    """
    try:
        yield
    except UsageError:
        raise
    except TqOnnxError as error:
        error.locate(path)
        raise
