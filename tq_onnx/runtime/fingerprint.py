"""Tell whether a model is the one that a calibration is of, by what it caches for a few tokens.

A digest of weights would name one file. People calibrate a float export and convert one with int4
weights, in which nothing has the same bytes, name or place. The keys and the values that a model
caches for the same token ids are the same in all of its exports, up to the rounding of weights.
They say which layer and which head made them, too: those of two heads point in directions of their
own. To compare them takes one call with sixteen tokens, of a model that calibrating ran over
thousands.

Measured by the cosine of each head, keys and values, on SmolLM2 with weights of 4 bits and
activations of 8: at least 0.96 and 0.83; of two heads of it 0.69 and 0.45 at most, and next to 0
mostly. The bundled Qwen3 with such weights: at least 0.99, and of two heads 0.32 at most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from tq_onnx.codec.calibration import Calibration
from tq_onnx.errors import TqOnnxError, UsageError

if TYPE_CHECKING:
    from tq_onnx.runtime.decoder import Decoder
    from tq_onnx.runtime.model import OpenModel

LEAST_KEY_COSINE: Final = 0.8
LEAST_VALUE_COSINE: Final = 0.6

_TOKENS: Final = 16
"""Few: what rounding does to a layer's input grows along a text of no meaning."""

_IDS: Final = 256
"""The lowest ids, bytes or letters in most vocabularies, whatever the padding of a table."""

Array = npt.NDArray[Any]
Ids = npt.NDArray[np.int64]


def fingerprint_tokens(vocabulary: int, longest: int | None) -> Ids:
    """Return the ids ``[n]`` whose keys and values tell one model from another, always the same.

    Args:
        longest: tokens that it takes at most; None for any number.
    """
    draws = np.random.default_rng(0).integers(0, min(vocabulary, _IDS), _TOKENS)
    return draws[:longest]


def read_fingerprint(decoder: Decoder, tokens: Sequence[int]) -> list[Array]:
    """Return what an original caches for the last of some tokens, by signature, ``[N, D]``."""
    ids = np.asarray(tokens, np.int64)
    for call in decoder.calls(len(ids)):
        decoder.prefill(ids[None, call])
    caches = (decoder.cache(index) for index in range(len(decoder.signature.caches)))
    return [cache[0, :, -1].astype(np.float64) for cache in caches]


def differing_layers(
    expected: Sequence[tuple[Array, Array]], caches: Sequence[Array]
) -> Iterator[tuple[int, str]]:
    """Yield the layers whose fingerprint is of something else, and how far it is off.

    Args:
        expected: key and value ``[N, D]`` of each layer.
        caches: keys and values of the model in turn, ``[N, D]``; values may be narrower.
    """
    for layer, pair in enumerate(expected):
        for role, table, rows, least in (
            ("key", pair[0], caches[2 * layer], LEAST_KEY_COSINE),
            ("value", pair[1], caches[2 * layer + 1], LEAST_VALUE_COSINE),
        ):
            cosines = _cosines(table[:, : rows.shape[1]], rows)
            head = int(cosines.argmin())
            if not cosines[head] >= least:
                yield layer, f"the {role} of head {head} has a cosine of {cosines[head]:.2f}"
                break


def takes_prompt(opened: OpenModel, decoder: Decoder, count: int) -> bool:
    """Return True if a model can read so many tokens at the beginning, in whole calls."""
    return count <= (opened.longest or count) and count % (decoder.longest_call or 1) == 0


def expect_model_of(path: Path, calibration: Calibration) -> tuple[str, ...]:
    """Refuse a model that a calibration is not of; its layers and heads have the same sizes.

    Returns:
        A sentence where this cannot be known, because the model cannot be run here.
    """
    # A conversion without a calibration needs no onnxruntime.
    from tq_onnx.runtime.opening import open_original

    try:
        opened = open_original(path)
        opened.refuse_text()
        ids = calibration.fingerprint_tokens
        if max(ids) >= opened.vocabulary:
            raise _another(f"it knows token {max(ids)}, and this model {opened.vocabulary} tokens")
        decoder = opened.decoder()
        if not takes_prompt(opened, decoder, len(ids)):
            return (_unknown(f"it takes no prompt of {len(ids)} tokens"),)
        caches = read_fingerprint(decoder, ids)
    except UsageError:
        raise
    except TqOnnxError as error:
        return (_unknown(error.what),)
    for layer, how in differing_layers(fingerprints_of(calibration), caches):
        raise _another(
            f"for the same tokens, layer {layer} caches something else than there ({how})"
        )
    return ()


def fingerprints_of(calibration: Calibration) -> list[tuple[Array, Array]]:
    """Return key and value ``[N, D]`` of each layer of a calibration."""
    tables = []
    for layer in calibration.layers:
        assert layer.k_fingerprint is not None  # calibrate reads them
        assert layer.v_fingerprint is not None
        tables.append((layer.k_fingerprint, layer.v_fingerprint))
    return tables


def _another(difference: str) -> UsageError:
    return UsageError(
        f"the calibration file is of another model: {difference}",
        fix="calibrate the very model that you convert, or another export of it",
    )


def _unknown(reason: str) -> str:
    return (
        f"the model was not run to tell whether the calibration file is of it: {reason}; "
        "`tq-onnx verify` tells where it runs"
    )


def _cosines(expected: Array, measured: Array) -> npt.NDArray[np.float64]:
    """Return the cosines of vectors ``[N, D]``; 1 for two zeros."""
    left, right = (np.asarray(array, np.float64) for array in (expected, measured))
    lengths = np.linalg.norm(left, axis=-1) * np.linalg.norm(right, axis=-1)
    products = (left * right).sum(axis=-1)
    both_zero = ~left.any(axis=-1) & ~right.any(axis=-1)
    cosines: npt.NDArray[np.float64] = np.where(
        both_zero, 1.0, products / np.where(lengths > 0, lengths, 1)
    )
    return cosines
