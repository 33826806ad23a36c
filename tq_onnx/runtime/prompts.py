"""Turn prompts into the arrays that a decoder takes, and refuse invalid ones."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tq_onnx.errors import UnsupportedModelError, UsageError
from tq_onnx.runtime.feeding import Tokens


def prompt_of(
    tokens: npt.ArrayLike, attention_mask: npt.ArrayLike | None, *, batch: int, padding: bool
) -> tuple[Tokens, Tokens]:
    """Return ids and mask ``[B, T]`` of a prompt.

    Args:
        tokens: ids ``[B, T]``.
        attention_mask: ``[B, T]``, 0 for padding on the left; None if there is none.
    """
    tokens_BT = ids_of(tokens)
    if tokens_BT.ndim != 2 or tokens_BT.shape[0] != batch or tokens_BT.shape[1] == 0:
        raise UsageError(f"tokens have shape {list(tokens_BT.shape)}, not [{batch}, 1 or more]")
    mask_BT = np.ones_like(tokens_BT)
    if attention_mask is not None:
        mask = np.asarray(attention_mask)
        if not ((mask == 0) | (mask == 1)).all():
            raise UsageError("the attention mask has other numbers than 0 and 1")
        mask_BT = np.ascontiguousarray(mask, np.int64)
        _check_mask(mask_BT, tokens_BT.shape, padding=padding)
    return tokens_BT, mask_BT


def ids_of(tokens: npt.ArrayLike) -> Tokens:
    """Return token ids as int64, in the shape that they have."""
    try:
        array = np.asarray(tokens)
    except ValueError as error:
        raise UsageError("tokens are no array: their lists have several lengths") from error
    if array.size and array.dtype.kind not in "iu":
        raise UsageError(f"tokens must be whole numbers, got type {array.dtype}")
    ids = np.ascontiguousarray(array, np.int64)
    if ids.min(initial=0) < 0:
        raise UsageError(f"a token id must be at least 0, got {ids.min()}")
    return ids


def _check_mask(mask_BT: Tokens, shape: tuple[int, ...], *, padding: bool) -> None:
    if mask_BT.shape != shape:
        raise UsageError(f"the attention mask has shape {list(mask_BT.shape)}, the tokens not")
    if not mask_BT.all() and not padding:
        raise UnsupportedModelError(
            "a model without inputs for mask and positions takes no padded batches",
            fix="feed sequences of equal length, or one at a time",
        )
    if (np.diff(mask_BT, axis=1) < 0).any() or not mask_BT[:, -1].all():
        raise UsageError("padding must stand on the left of each sequence")
