"""Text to tokens and back, from the tokenizer files that lie beside a model.

``load_tokenizer`` reads a Hugging Face ``tokenizer.json`` by the ``tokenizers`` library where it is
installed (the ``text`` extra). Without it, one simple kind is still understood: a byte-level
tokenizer without merges, in which every byte is a token, as the bundled model has. Both give the
same tokens and the same text. transformers and torch are not needed.

Bytes that are not UTF-8, which a model is free to write, become U+FFFD.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
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

    Raises:
        ModelFileError: there is no readable ``tokenizer.json``, or it is of a kind that needs the
            ``tokenizers`` library, which is not installed.
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
    eos_ids = _eos_ids(directory)
    try:
        import tokenizers
    except ImportError:
        return _load_without_library(path, text, eos_ids)
    with _damage_of(path):
        return _LibraryTokenizer(tokenizers.Tokenizer.from_str(text), eos_ids, path)


def stream_text(tokenizer: Tokenizer, tokens: Iterable[int]) -> Iterator[str]:
    """Yield the text of each token as soon as it is certain.

    A character of several bytes may take several tokens: it is held back until it is complete, so
    the pieces joined are ``decode`` of all tokens. Only the last character of a text can be
    incomplete, and the decoder then shows one U+FFFD for it.

    Args:
        tokenizer: any tokenizer.
        tokens: the tokens, one by one; each is taken only when the piece before it was.

    Yields:
        One piece per token, possibly empty, and the rest, if any, at the end.
    """
    text = TextStream(tokenizer)
    for token in tokens:
        yield text.take(token)
    rest = text.rest()
    if rest:
        yield rest


class TextStream:
    """The text of tokens that come one by one; see ``stream_text``.

    Args:
        tokenizer: any tokenizer.
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
        _utf8(text)
        with _damage_of(self._path):
            # Unlike encode, which is for one text, it lets other threads run meanwhile.
            done = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
            return list(done[0].ids)

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


class _ByteTokenizer:
    """One token per byte, and special tokens."""

    def __init__(
        self, byte_of: Mapping[int, int], special: Mapping[str, int], eos_ids: tuple[int, ...]
    ) -> None:
        self._byte_of = byte_of
        self._token_of = {byte: token for token, byte in byte_of.items()}
        self._special = special
        # Longest first, as the library does where one begins like another.
        names = sorted(map(re.escape, special), key=len, reverse=True)
        self._splitter = re.compile(f"({'|'.join(names)})") if names else None
        self.eos_ids = eos_ids

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        del add_special_tokens  # it has none to add
        _utf8(text)
        tokens: list[int] = []
        for part in self._splitter.split(text) if self._splitter else [text]:
            if part in self._special:
                tokens.append(self._special[part])
            else:
                tokens.extend(self._token_of[byte] for byte in _utf8(part))
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        known = bytes(self._byte_of[token] for token in tokens if token in self._byte_of)
        return known.decode("utf-8", errors="replace")


def _load_without_library(path: Path, text: str, eos_ids: tuple[int, ...]) -> Tokenizer:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _damaged(path) from error
    tokenizer = _byte_tokenizer(fields, eos_ids)
    if tokenizer is None:
        raise ModelFileError(
            "this tokenizer needs the tokenizers library",
            where=str(path),
            fix="install it: pip install 'tq-onnx[text]'",
        )
    return tokenizer


def _byte_tokenizer(fields: Any, eos_ids: tuple[int, ...]) -> Tokenizer | None:
    """Return the tokenizer that the JSON describes if it is byte-level and has no merges."""
    try:
        model, before, after = fields["model"], fields["pre_tokenizer"], fields["post_processor"]
        simple = (
            model["type"] == "BPE"
            and not model["merges"]
            and not fields["normalizer"]
            and (before["type"], before["add_prefix_space"]) == ("ByteLevel", False)
            and fields["decoder"]["type"] == "ByteLevel"
            and (after is None or not after.get("special_tokens"))
            and all(
                entry["special"]
                and not (entry["lstrip"] or entry["rstrip"] or entry["single_word"])
                for entry in fields["added_tokens"]
            )
        )
        byte_of = {model["vocab"][char]: byte for byte, char in enumerate(_byte_characters())}
        special = {entry["content"]: entry["id"] for entry in fields["added_tokens"]}
        simple = (
            simple
            and len(byte_of) == 256
            and all(type(token) is int for token in (*byte_of, *special.values()))
            and all(name and isinstance(name, str) for name in special)
        )
    # Any field that is missing or of another form means another kind of tokenizer.
    except (KeyError, TypeError, AttributeError):
        return None
    return _ByteTokenizer(byte_of, special, eos_ids) if simple else None


def _byte_characters() -> list[str]:
    """Return the character that stands for each byte in byte-level vocabularies.

    Printable Latin-1 characters stand for themselves, the other bytes, in order, for U+0100 and on
    (``bytes_to_unicode`` of GPT-2's ``encoder.py``).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


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


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError("the text is not valid Unicode", fix="pass it as UTF-8") from error


def _damaged(path: Path) -> ModelFileError:
    return ModelFileError(
        "the tokenizer cannot be read",
        where=str(path),
        fix="copy it again from the original model",
    )
