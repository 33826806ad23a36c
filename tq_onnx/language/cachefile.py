"""Cache files: safetensors with the used rows of each cache, the ids, and whose they are.

Tensors are ``cache.0`` and so on, ``[1, N, used, row]`` in the order of the model's caches, where
rows of an exact window are the first; ``state.NAME`` of recurrent layers; ``tokens``, int64
``[length]``, and ``mask``. The metadata has the version of the format and three digests:

    model    of the file, with the size and samples of its external data
    plan     of the conversion; of the names and types of the caches for an original
    layout   of a row

and, of a conversation, ``messages``: its turns as JSON.

A cache of another model, conversion or layout is refused: its bytes would mean something else. A
file comes from anywhere: names, types and shapes are compared before anything is used, and its
floats have to be finite: the metadata of rows, rows of floats, entries of a window, states.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tq_onnx.codec.elements import from_bytes
from tq_onnx.codec.reference import fields_of
from tq_onnx.codec.spec import row_layout
from tq_onnx.errors import ModelFileError, OutputExistsError, UsageError
from tq_onnx.files.arrays import (
    DAMAGES,
    Arrays,
    facts_of,
    read_arrays,
    reason_of,
    write_arrays,
)
from tq_onnx.files.regular import open_regular
from tq_onnx.language.templates import Message, texts_of
from tq_onnx.runtime.memory import free_memory
from tq_onnx.runtime.signature import Signature
from tq_onnx.runtime.snapshot import Snapshot

FORMAT: Final = "tq_onnx.cache"
FORMAT_VERSION: Final = "1"
_MESSAGES: Final = "messages"

_LARGEST_FILE: Final = 1 << 42
_SAMPLES: Final = 256
_SAMPLE_BYTES: Final = 4096
_WHOLE: Final = _SAMPLES * _SAMPLE_BYTES
_MEANINGS: Final = {
    "model": "another model",
    "plan": "another conversion of the model",
    "layout": "another row layout",
}


@dataclass(frozen=True)
class Identity:
    """The model that a cache belongs to."""

    model: str  #: digest of its files
    plan: str  #: digest of its conversion
    layout: str  #: digest of its rows; empty for an original


def identity_of(files: Sequence[Path], signature: Signature, plan_text: str | None) -> Identity:
    """Return the digests of a model.

    Files of more than 1 MiB count by their size and 256 samples of 4 KiB, evenly spread, so that
    nobody waits for gigabytes to be read.

    Args:
        plan_text: its plan as the file has it, so that a later tq-onnx, whose plans say more, finds
            the same; None for an original.
    """
    digest = hashlib.sha256()
    for file in files:
        _take(file, digest)
    plan = signature.plan
    plan_facts = plan_text or repr(
        [(spec.pair, spec.type_name, spec.row) for spec in signature.caches]
    )
    plan_digest = hashlib.sha256(plan_facts.encode()).hexdigest()
    return Identity(digest.hexdigest(), plan_digest, plan.layout_digest if plan else "")


def write_cache(
    path: Path,
    tokens: Sequence[int],
    held: Snapshot,
    identity: Identity,
    messages: Sequence[Message] = (),
) -> None:
    """Write a cache; the file appears whole, or what was there stays."""
    turns = texts_of(messages)
    if os.path.lexists(path) and facts_of(path).get("format") != FORMAT:
        raise OutputExistsError(
            "the output exists and is no cache", where=str(path), fix="give another output"
        )
    facts = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "model": identity.model,
        "plan": identity.plan,
        "layout": identity.layout,
    }
    if turns:
        facts[_MESSAGES] = json.dumps(turns)
    write_arrays(path, arrays_of(tokens, held), facts, overwrite=True)


def arrays_of(tokens: Sequence[int], held: Snapshot) -> Arrays:
    """Return tokens, their keys and values as the tensors of a file."""
    arrays: Arrays = {f"cache.{index}": plane for index, plane in enumerate(held.planes)}
    arrays |= {f"state.{name}": value for name, value in held.states.items()}
    return {**arrays, "tokens": np.asarray(tokens, np.int64), "mask": held.mask}


@dataclass(frozen=True, eq=False)
class SavedCache:
    """What a cache file holds."""

    tokens: list[int]  #: ids of the tokens
    held: Snapshot  #: their keys and values
    #: the turns of the conversation that they are of; none if they are of none
    messages: list[Message]


def read_cache(
    path: Path, signature: Signature, empty: Snapshot, identity: Identity, *, vocabulary: int
) -> SavedCache:
    """Read a cache."""
    largest = free_memory() or _LARGEST_FILE
    try:
        arrays, facts = read_arrays(
            path, largest=largest, check=lambda facts: _check_facts(facts, identity, str(path))
        )
        tokens, held = contents_of(arrays, signature, empty, vocabulary)
        messages = _messages(facts)
    except FileNotFoundError as error:
        raise ModelFileError(
            "there is no such file", where=str(path), fix="check the path"
        ) from error
    except DAMAGES as error:
        raise ModelFileError(
            f"the file is not a cache ({reason_of(error)})",
            where=str(path),
            fix="save it again with Cache.save",
        ) from error
    return SavedCache(tokens, held, messages)


def _messages(facts: dict[str, str]) -> list[Message]:
    try:
        return texts_of(json.loads(facts.get(_MESSAGES, "[]")))
    except (UsageError, RecursionError) as error:
        raise ValueError("its messages are invalid") from error


def _check_facts(facts: dict[str, str], identity: Identity, where: str) -> None:
    if facts.get("format") != FORMAT:
        raise ValueError("the metadata names no such format")
    if facts.get("format_version") != FORMAT_VERSION:
        raise ValueError(f"version {facts.get('format_version', '')!r:.20} of the format")
    for name, meaning in _MEANINGS.items():
        if facts.get(name) != getattr(identity, name):
            raise UsageError(
                f"the cache belongs to {meaning}",
                where=where,
                fix="open the model that it was saved with",
            )


def contents_of(
    arrays: Arrays, signature: Signature, empty: Snapshot, vocabulary: int
) -> tuple[list[int], Snapshot]:
    """Return tokens, their keys and values from the tensors of a file.

    Raises:
        ValueError: names, types, shapes, ids or numbers are not those of such a cache.
    """
    states = {f"state.{name}": value for name, value in empty.states.items()}
    count = len(signature.caches)
    expected = {"tokens", "mask", *states, *(f"cache.{index}" for index in range(count))}
    if arrays.keys() != expected:
        odd = min(arrays.keys() ^ expected)
        raise ValueError(f"the tensor {odd[:60]} is {'unknown' if odd in arrays else 'missing'}")
    tokens, mask = arrays["tokens"], arrays["mask"]
    if tokens.dtype != np.int64 or tokens.ndim != 1 or not len(tokens):
        raise ValueError("the tokens are no list of ids")
    if tokens.min() < 0 or tokens.max() >= vocabulary:
        raise ValueError("the model does not know all of the ids")
    if mask.dtype != np.int64 or mask.shape != (1, len(tokens)) or not (mask == 1).all():
        raise ValueError("the mask is not that of the tokens")
    planes = []
    for index, spec in enumerate(signature.caches):
        plane = arrays[f"cache.{index}"]
        shape = (1, spec.kv_num_heads, spec.used_rows(len(tokens)), spec.row)
        if plane.shape != shape or plane.dtype != spec.type_name:
            raise ValueError(f"cache.{index} is {plane.dtype} {list(plane.shape)}")
        floats = _floats(plane, signature, index, len(tokens))
        is_finite = all(np.isfinite(part).all() for part in floats)
        if not is_finite or spec.has_damaged_entries(plane, len(tokens)):
            raise ValueError(f"cache.{index} has numbers that are not finite")
        planes.append(plane)
    for name, value in states.items():
        if arrays[name].shape != value.shape or arrays[name].dtype != value.dtype:
            raise ValueError(f"{name[:60]} has another shape or type")
        if not np.isfinite(arrays[name]).all():
            raise ValueError(f"{name[:60]} has numbers that are not finite")
    state_arrays = {name.removeprefix("state."): arrays[name] for name in states}
    return tokens.tolist(), Snapshot(tuple(planes), mask, state_arrays)


def _floats(
    plane: npt.NDArray[Any], signature: Signature, index: int, tokens: int
) -> Iterable[npt.NDArray[Any]]:
    """Return the floats in the rows of a cache of so many tokens: of an original, or its fields."""
    coding, spec = signature.coding(index), signature.caches[index]
    if coding is None:
        return (plane,)
    codec, element = coding
    layout = row_layout(codec, spec.head_size)
    rows = spec.of_tokens(plane)[:, :, :tokens, : layout.row_bytes]
    if codec.is_raw:
        return (from_bytes(rows, codec, element),)
    fields = fields_of(rows, layout).values()
    if not codec.is_signed:
        return fields
    # Rows are integers times the scale: what no float32 holds is no finite row.
    largest = np.float32(codec.sign_bit * spec.head_size)
    with np.errstate(over="ignore"):
        return [np.asarray(field, np.float32) * largest for field in fields]


def _take(file: Path, digest: hashlib._Hash) -> None:
    """Hash a file of up to 1 MiB, or its size and samples of it."""
    with open_regular(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        digest.update(size.to_bytes(8, "little"))
        if size <= _WHOLE:
            digest.update(stream.read())
            return
        for index in range(_SAMPLES):
            stream.seek((size - _SAMPLE_BYTES) * index // (_SAMPLES - 1))
            digest.update(stream.read(_SAMPLE_BYTES))
