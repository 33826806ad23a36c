"""Text to tokens and back, from the tokenizer files that lie beside a model.

``load_tokenizer`` reads a Hugging Face ``tokenizer.json`` by the ``tokenizers`` library.
transformers and torch are not needed.

Bytes that are not UTF-8, which a model is free to write, become U+FFFD.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

from tq_onnx.errors import ModelFileError, UsageError
from tq_onnx.files.regular import read_text

TOKENIZER_FILE: Final = "tokenizer.json"
#: Files that name the tokens which end a text; the first that does is believed.
EOS_FILES: Final = ("generation_config.json", "genai_config.json", "config.json")
REPLACEMENT: Final = "\ufffd"


class Tokenizer(Protocol):
    """The part of a tokenizer that the runtime needs."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end a text; empty if the files name none."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of ``text``; special tokens written out in it count as such.

        The tokenizer adds its own, at the beginning most often, unless it is told not to.
        """

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ``tokens``, without special tokens."""


def load_tokenizer(directory: Path) -> Tokenizer:
    """Load the tokenizer of a model.

    Args:
        directory: the folder with ``tokenizer.json`` and, for the end of text, any of
            ``EOS_FILES``.
    """
    path = directory / TOKENIZER_FILE
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFileError(
            "there is no readable tokenizer",
            where=str(path),
            fix="copy the tokenizer's files of the original model there",
        ) from error
    import tokenizers

    with _damage_of(path):
        return _LibraryTokenizer(tokenizers.Tokenizer.from_str(text), _eos_ids(directory), path)


class TextStream:
    """The text of tokens that come one by one, each piece as soon as it is certain.

    A character of several bytes may take several tokens: it is held back until it is complete, so
    the pieces joined are ``decode`` of all tokens. Only the last character of a text can be
    incomplete, and the decoder then shows one U+FFFD for it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Begin with no text; see the class for arguments."""
        self._tokenizer = tokenizer
        self._context: list[int] = []  # decoded in full before; some tokenizers need what precedes
        self._pending: list[int] = []
        self._shown = 0  # characters of the pending text that were given out

    def take(self, token: int) -> str:
        """Take a token, and return the text that has become certain."""
        self._pending.append(token)
        text = self._text()
        complete = not text.endswith(REPLACEMENT)
        piece = text[self._shown :] if complete else text[self._shown : -1]
        self._shown += len(piece)
        if complete and text:
            self._context, self._pending, self._shown = self._pending, [], 0
        return piece

    def rest(self) -> str:
        """Return the text that never became certain."""
        return self._text()[self._shown :]

    def _text(self) -> str:
        whole = self._tokenizer.decode(self._context + self._pending)
        return whole[len(self._tokenizer.decode(self._context)) :]


class _LibraryTokenizer:
    """A tokenizer of the ``tokenizers`` library."""

    def __init__(self, library_tokenizer: Any, eos_ids: tuple[int, ...], path: Path) -> None:
        self._tokenizer = library_tokenizer
        self._path = path
        self.eos_ids = eos_ids

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        _expect_utf8(text)
        with _damage_of(self._path):
            # Unlike encode, which is for one text, it lets other threads run meanwhile.
            encodings = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
            return list(encodings[0].ids)

    def decode(self, tokens: Sequence[int]) -> str:
        with _damage_of(self._path):
            return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))


@contextmanager
def _damage_of(path: Path) -> Iterator[None]:
    """Refuse a tokenizer with which the library fails, at whatever moment.

    It raises plain Exception, and where its Rust gives up a PanicException, which is none.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise _damaged(path) from error


def _eos_ids(directory: Path) -> tuple[int, ...]:
    for name in EOS_FILES:
        try:
            fields = json.loads(read_text(directory / name))
            # genai_config.json keeps it one level deeper.
            eos = fields.get("model", fields).get("eos_token_id")
        except (OSError, ValueError, AttributeError, RecursionError):
            continue
        ids = eos if isinstance(eos, list) else [eos]
        if ids and all(type(token) is int for token in ids):
            return tuple(ids)
    return ()


def _expect_utf8(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError("the text is not valid Unicode", fix="pass it as UTF-8") from error


def _damaged(path: Path) -> ModelFileError:
    return ModelFileError(
        "the tokenizer cannot be read",
        where=str(path),
        fix="copy it again from the original model",
    )
