"""Prompts kept on disk: what a model has read of their beginnings, for any process to go on with.

A prompt is read in calls of up to 512 tokens. What the caches hold after each of these calls, but
the last, is one file: the rows of its tokens, the exact tokens and the states of recurrent layers
as they are at its end. So a prompt that begins alike finds the same caches, to the bit, that it
would compute, as far as it is the same in whole calls. The name of a file is a digest of all tokens
up to its end, of the model, and of what else decides about bits: kernels, threads, ONNX Runtime.

Files appear whole or not at all, and each has a checksum. One that is damaged is removed and
computed again. Processes share a folder without waiting for each other. Those files go first that
were used least recently, of a prompt its end before its beginning.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from tq_onnx.errors import ModelFileError, UnsupportedModelError
from tq_onnx.files.abandoned import remove_all_abandoned
from tq_onnx.files.arrays import DAMAGES, Arrays, read_arrays, reason_of, write_arrays
from tq_onnx.language.cachefile import arrays_of, contents_of
from tq_onnx.runtime import arguments, generate
from tq_onnx.runtime.snapshot import Snapshot, joined

if TYPE_CHECKING:
    from tq_onnx.language.cache import Cache
    from tq_onnx.runtime.decoder import Decoder
    from tq_onnx.runtime.model import OpenModel

FORMAT: Final = "tq_onnx.prompt"
FORMAT_VERSION: Final = "1"
LIMIT: Final = 4 << 30
"""Bytes of a folder where a caller gives no number."""

_LARGEST_FILE: Final = 1 << 42
_HEADER: Final = 256
"""Bytes in a file of name, type and shape of a tensor, and of the metadata: more than needed."""
_NAME: Final = re.compile(r"(\d{6})-[0-9a-f]{64}\.safetensors")


@dataclass(frozen=True)
class _Part:
    """Tokens of a prompt that are one file."""

    number: int
    start: int
    stop: int
    key: str

    @property
    def name(self) -> str:
        """Name of the file."""
        return f"{self.number:06}-{self.key}.safetensors"


class PromptStore:
    """A folder with what models have read of prompts; ``tq_onnx.load`` takes one.

    Any number of models, threads and processes may use a folder at a time. It holds the tokens of
    prompts, so it is made for its owner only.

    Args:
        folder: where the files are; made if it does not exist. Other files in it stay.
        bytes: of all files at most. A prompt that needs more is kept as far as it fits.

    Raises:
        UsageError: an argument is none.
        ModelFileError: the folder cannot be made or read.
    """

    def __init__(self, folder: str | PathLike[str], *, bytes: int = LIMIT) -> None:
        """Make the folder; see the class for arguments and errors."""
        self.folder = arguments.path(folder, "folder")
        self.bytes = arguments.count(bytes, "bytes", least=1)
        self._has_warned = False
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            remove_all_abandoned(self.folder)
        except OSError as error:
            raise ModelFileError(
                f"the folder cannot be used ({error.strerror or error})",
                where=str(self.folder),
                fix="give another folder",
            ) from error

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(size for *_, size, _ in self._files())

    def read(
        self, cache: Cache, tokens: Sequence[int], identity: str, vocabulary: int, shared: int
    ) -> int:
        """Read the beginning of a prompt: from files as far as there are, then by the model.

        The last call is left, for its logits. A cache that already holds more than the files do is
        left as it is, and nothing is written: its tokens may have been read in other calls.

        Args:
            cache: in use by the caller, with the shared tokens of the prompt.
            tokens: ids of the prompt.
            identity: digest of all that decides about the bits of a cache, but the tokens.
            vocabulary: ids are below it.
            shared: tokens in the cache.

        Returns:
            The tokens of the prompt that were not computed.

        Raises:
            UnsupportedModelError: the model fails.
        """
        parts = _parts(cache.decoder, tokens, identity)
        now = time.time_ns()
        files = list(takewhile(lambda part: (self.folder / part.name).exists(), parts))
        if shared and not any(part.stop > shared for part in files):
            return shared
        held = self._held(cache.decoder, files, tokens, vocabulary)
        count = len(held)
        known = parts[count - 1].stop if held else 0
        if shared and known <= shared:
            return shared
        if held:
            cache.replace(joined(held, cache.decoder.signature.caches), tokens)
            self._touch(parts[:count], now)
        held.clear()
        used = sum(self._sizes(parts[:count]))
        for part in parts[count:]:
            cache.decoder.read([tokens[part.start : part.stop]], most=generate.PROMPT_PIECE)
            used = self._write(part, tokens, cache.decoder, used, now)
        return known

    def _held(
        self, decoder: Decoder, parts: Sequence[_Part], tokens: Sequence[int], vocabulary: int
    ) -> list[Snapshot]:
        """Return what the files hold of the first parts, as far as each has one."""
        held: list[Snapshot] = []
        empty = decoder.snapshot(decoder.length)
        for part in parts:
            path = self.folder / part.name
            try:
                arrays, _ = _read(path, part)
                ids, snapshot = contents_of(arrays, decoder.signature, empty, vocabulary)
                if ids != tokens[part.start : part.stop]:
                    raise ValueError("the tokens are of another prompt")
            except FileNotFoundError:
                break
            except DAMAGES as error:
                self._warn(f"{path.name} is damaged ({reason_of(error)}) and computed again")
                with suppress(OSError):
                    path.unlink()
                break
            held.append(snapshot)
        return held

    def _write(
        self, part: _Part, tokens: Sequence[int], decoder: Decoder, used: int, now: int
    ) -> int:
        """Write a part, unless the prompt has too many bytes; return its bytes so far."""
        if used > self.bytes:
            return used
        arrays = arrays_of(tokens[part.start : part.stop], decoder.snapshot(part.start))
        size = sum(array.nbytes + _HEADER for array in arrays.values()) + _HEADER
        used += size
        path = self.folder / part.name
        if used > self.bytes:
            return used
        if path.exists():
            self._touch([part], now)
            return used
        facts = {"format": FORMAT, "format_version": FORMAT_VERSION, "key": part.key}
        facts["sha256"] = _digest(arrays, facts)
        try:
            self._make_room(size)
            write_arrays(path, arrays, facts, overwrite=False)
            self._touch([part], now)
        except (ModelFileError, OSError) as error:
            if not path.exists():  # by another process
                reason = error.what if isinstance(error, ModelFileError) else reason_of(error)
                self._warn(f"prompts are not kept: {reason}")
        return used

    def _make_room(self, size: int) -> None:
        """Remove the files that were used least recently, until there is room for another one."""
        remove_all_abandoned(self.folder)
        files = sorted(self._files())
        total = sum(each for *_, each, _ in files)
        for _, _, each, path in files:
            if total + size <= self.bytes:
                return
            path.unlink(missing_ok=True)
            total -= each

    def _files(self) -> Iterator[tuple[int, int, int, Path]]:
        """Yield time of use, place from the end, bytes and path of each file."""
        with os.scandir(self.folder) as entries:
            for entry in entries:
                match = _NAME.fullmatch(entry.name)
                if match is None:
                    continue
                with suppress(OSError):  # removed by another process
                    status = entry.stat(follow_symlinks=False)
                    yield status.st_mtime_ns, -int(match[1]), status.st_size, Path(entry.path)

    def _sizes(self, parts: Sequence[_Part]) -> Iterator[int]:
        for part in parts:
            with suppress(OSError):
                yield (self.folder / part.name).stat().st_size

    def _touch(self, parts: Sequence[_Part], now: int) -> None:
        """Note that parts were used, the first ones last."""
        for part in parts:
            with suppress(OSError):
                os.utime(self.folder / part.name, ns=(now - part.number, now - part.number))

    def _warn(self, sentence: str) -> None:
        """Warn once: what fails for one file fails for most."""
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(f"{self.folder}: {sentence}", RuntimeWarning, stacklevel=2)


def refuse_model(opened: OpenModel) -> None:
    """Refuse a model that does not read a prompt in the same calls from the end of any call on."""
    signature = opened.signature
    sizes = {spec.block_size for spec in signature.caches if spec.pages is not None}
    if opened.first is not None or signature.first_only:
        reason = "the first tokens of a prompt have a graph of their own"
    elif any(generate.PROMPT_PIECE % size for size in sizes):
        reason = f"a page has {max(sizes)} tokens, and a call {generate.PROMPT_PIECE}"
    else:
        return
    raise UnsupportedModelError(
        f"prompts of this model cannot be kept on disk: {reason}",
        where=str(opened.path),
        fix="leave `prompt_store` out",
    )


def _parts(decoder: Decoder, tokens: Sequence[int], identity: str) -> list[_Part]:
    """Return the parts of a prompt that are files: whole calls, the last one left out."""
    parts: list[_Part] = []
    digest = hashlib.sha256(identity.encode())
    start = 0
    for call in decoder.calls(len(tokens), generate.PROMPT_PIECE):
        digest.update(np.asarray([call.stop, *tokens[call]], "<i8").tobytes())
        if call.stop - start >= generate.PROMPT_PIECE and call.stop < len(tokens):
            parts.append(_Part(len(parts), start, call.stop, digest.hexdigest()))
            start = call.stop
    return parts


def _read(path: Path, part: _Part) -> tuple[Arrays, dict[str, str]]:
    """Read a file and check that it is whole.

    Raises:
        OSError, ValueError and others of ``DAMAGES``: it is not.
    """
    arrays, facts = read_arrays(path, largest=_LARGEST_FILE)
    digest = facts.pop("sha256", "")
    if facts != {"format": FORMAT, "format_version": FORMAT_VERSION, "key": part.key}:
        raise ValueError("the metadata are of another file")
    if digest != _digest(arrays, facts):
        raise ValueError("the checksum is wrong")
    return arrays, facts


def _digest(arrays: Arrays, facts: dict[str, str]) -> str:
    """Return the checksum of a file."""
    digest = hashlib.sha256(repr(sorted(facts.items())).encode())
    for name, array in sorted(arrays.items()):
        digest.update(repr((name, array.dtype.str, array.shape)).encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
