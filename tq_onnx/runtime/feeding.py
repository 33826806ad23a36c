"""Make the inputs of a decoder besides its caches, from tokens and the mask of all tokens.

===================  =====================  ======================================================
input                shape                  contents
===================  =====================  ======================================================
tokens               ``[B, T]``             ids; or their rows of a table, ``[B, T, hidden]``
attention mask       ``[B, S]``             1 for tokens that count; zeros up to a fixed length
positions            ``[B, T]``             tokens before it that count
``visible``          ``[B, 1, T, slots]``   keys that count and are not later; bool, or 0 and lowest
``past_length``      ``[]``, [1], ``[B]``   tokens in the caches before the call
``total_length``     ``[]``, [1], ``[B]``   the same after it
``new_lengths``      ``[B]``                new tokens that count
``cache_positions``  ``[T]``                past length + 0, 1, ...
``logits_to_keep``   ``[]``, ``[1]``        T
``ignored``          any                    zeros
``encoder``          any                    made up: noise, alike for all sequences; ones
===================  =====================  ======================================================

Where caches lie in pages, tokens are packed, ``[B * T]``: the sequences one behind the other. Fed
are then also where each begins, the tokens before it, and its pages (``tq_onnx.plan.PACKING``).

States of recurrent layers are zeros before the first call; the decoder keeps them.

Refused: inputs that are none of these, by name; tokens or masks of other types.
"""

from __future__ import annotations

from typing import Any, Final
from zlib import crc32

import numpy as np
import numpy.typing as npt
import onnxruntime

from tq_onnx.errors import UnsupportedModelError
from tq_onnx.plan import (
    BLOCK_TABLE,
    CACHE_POSITIONS,
    CUMULATIVE_LENGTHS,
    ENCODER,
    IGNORED,
    LOGITS_INDICES,
    LOGITS_TO_KEEP,
    NEW_LENGTHS,
    PACKING,
    PAST_LENGTH,
    PAST_LENGTHS,
    TOTAL_LENGTH,
    VISIBLE,
    Interface,
)
from tq_onnx.runtime.cache import CacheSpec, block_table, pages_of

Tokens = npt.NDArray[np.int64]

_INTEGERS: Final = {"tensor(int64)": np.int64, "tensor(int32)": np.int32}
FLOATS: Final = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
_FLAGS: Final = {"tensor(bool)": np.bool_}
_ANY: Final = {**_INTEGERS, **FLOATS, **_FLAGS}
_ENCODED: Final = 24
"""Tokens of an encoder's made-up result, where the graph tells no number."""


class Feeding:
    """Makes the inputs of one graph.

    Args:
        embeddings: floats ``[vocabulary, hidden]`` for a graph that takes no ids.
    """

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        interface: Interface,
        caches: tuple[CacheSpec, ...],
        embeddings: npt.NDArray[Any] | None = None,
    ) -> None:
        """Look at the graph's inputs; see the class for arguments and errors."""
        self.interface = interface
        self._entries = {entry.name: entry for entry in session.get_inputs()}
        self._embeddings = embeddings
        self._block_size = max((spec.block_size for spec in caches), default=0)
        self._returned = {entry.name: entry for entry in session.get_outputs()}
        encoder_shapes = [
            self._entries[entry.name].shape for entry in interface.fed if entry.role == ENCODER
        ]
        stated = [shape[-2 if len(shape) > 2 else -1] for shape in encoder_shapes]
        self._encoded = max((size for size in stated if isinstance(size, int)), default=_ENCODED)
        self._check(caches)
        tokens = [None, None] if self._block_size else self._entries[interface.tokens].shape
        self.batch: int | None = tokens[0] if isinstance(tokens[0], int) else None
        """Sequences that the graph takes; None for any number."""
        self.new: int | None = tokens[1] if isinstance(tokens[1], int) else None
        """Tokens that the graph takes in a call; None for any number."""

    @property
    def takes_padding(self) -> bool:
        """True if the graph is told which tokens count, and the positions of those that do."""
        masked = self.interface.attention_mask is not None or any(
            entry.role == VISIBLE for entry in self.interface.fed
        )
        positions = self.interface.position_ids is not None
        return masked and positions and self.interface.padding

    def values(self, tokens_BT: Tokens, mask_BS: Tokens, slots: int) -> dict[str, npt.NDArray[Any]]:
        """Return all inputs but the caches.

        Args:
            slots: tokens that the caches have room for.
        """
        names = self.interface
        new, total = tokens_BT.shape[1], mask_BS.shape[1]
        values: dict[str, npt.NDArray[Any]] = {names.tokens: self._tokens(tokens_BT)}
        if names.attention_mask is not None:
            values[names.attention_mask] = self._mask(names.attention_mask, mask_BS)
        if names.position_ids is not None:
            positions_BS = np.maximum(np.cumsum(mask_BS, axis=1) - 1, 0)
            values[names.position_ids] = self._typed(
                names.position_ids, positions_BS[:, total - new :], _INTEGERS
            )
        for entry in names.fed:
            values[entry.name] = self._fed(entry.name, entry.role, mask_BS, new, slots)
        if self._block_size:
            values |= self._packing(len(mask_BS), total, new)
        return values

    def _packing(self, batch: int, total: int, new: int) -> dict[str, npt.NDArray[np.int32]]:
        """Return where packed sequences begin, the tokens before them, and their pages."""
        bounds = new * np.arange(batch + 1, dtype=np.int32)
        return {
            LOGITS_INDICES: bounds[1:] - 1,
            CUMULATIVE_LENGTHS: bounds,
            PAST_LENGTHS: np.full(batch, total - new, np.int32),
            BLOCK_TABLE: block_table(batch, pages_of(total, self._block_size)),
        }

    def first_states(self, rows: int) -> dict[str, npt.NDArray[Any]]:
        """Return the states before the first call, by their inputs: zeros for so many sequences."""
        states = {}
        for pair in self.interface.states:
            if pair.past is not None:
                # Some exporters name the sizes of the input: "64". Those of the output are numbers.
                sizes = self._returned[pair.present].shape[1:]
                states[pair.past] = self._typed(pair.past, np.zeros((rows, *sizes)), FLOATS)
        return states

    def _tokens(self, tokens_BT: Tokens) -> npt.NDArray[Any]:
        name = self.interface.tokens
        if self._embeddings is None:
            packed = tokens_BT.reshape(-1) if self._block_size else tokens_BT
            return self._typed(name, packed, _INTEGERS)
        return self._typed(name, self._embeddings[tokens_BT], FLOATS)

    def _mask(self, name: str, mask_BS: Tokens) -> npt.NDArray[Any]:
        length = self._entries[name].shape[1]
        if isinstance(length, int) and length > mask_BS.shape[1]:
            mask_BS = np.pad(mask_BS, ((0, 0), (0, length - mask_BS.shape[1])))
        return self._typed(name, mask_BS, {**_INTEGERS, **_FLAGS})

    def _fed(self, name: str, role: str, mask_BS: Tokens, new: int, slots: int) -> npt.NDArray[Any]:
        batch, total = mask_BS.shape
        if role == VISIBLE:
            return self._visible(name, mask_BS, new, slots)
        if role == IGNORED:
            entry = self._entries[name]
            shape = [dim if isinstance(dim, int) else 1 for dim in entry.shape]
            return self._typed(name, np.zeros(shape), _ANY)
        if role == ENCODER:
            return self._made_up(name, batch)
        if role == NEW_LENGTHS:
            return self._typed(name, mask_BS[:, total - new :].sum(axis=1), _INTEGERS)
        if role == CACHE_POSITIONS:
            return self._typed(name, np.arange(total - new, total), _INTEGERS)
        number = {PAST_LENGTH: total - new, TOTAL_LENGTH: total, LOGITS_TO_KEEP: new}[role]
        shape = self._entries[name].shape
        # One number for all sequences where the graph says so, else one for each.
        sizes = [1 if shape[0] == 1 or role == LOGITS_TO_KEEP else batch] if shape else []
        return self._typed(name, np.full(sizes, number), _INTEGERS)

    def _made_up(self, name: str, batch: int) -> npt.NDArray[Any]:
        """Return what stands for an encoder's result, always the same for an input."""
        stated = self._entries[name].shape[1:]
        sizes = [dim if isinstance(dim, int) else self._encoded for dim in stated]
        if self._entries[name].type not in FLOATS:
            return self._typed(name, np.ones((batch, *sizes)), {**_INTEGERS, **_FLAGS})
        noise = np.random.default_rng(crc32(name.encode())).standard_normal(sizes)
        return self._typed(name, np.broadcast_to(noise, (batch, *sizes)), FLOATS)

    def _visible(self, name: str, mask_BS: Tokens, new: int, slots: int) -> npt.NDArray[Any]:
        total = mask_BS.shape[1]
        stated = self._entries[name].shape[3]
        slots = max(stated if isinstance(stated, int) else slots, total)
        slot, query = np.arange(slots), np.arange(total - new, total)
        counts = np.pad(mask_BS.astype(bool), ((0, 0), (0, slots - total)))
        seen = counts[:, None, None, :] & (slot <= query[:, None])
        if self._entries[name].type in _FLAGS:
            return self._typed(name, seen, _FLAGS)
        lowest = np.finfo(FLOATS[self._entries[name].type]).min
        return self._typed(name, np.where(seen, 0, lowest), FLOATS)

    def _typed(
        self, name: str, values: npt.NDArray[Any], types: dict[str, Any]
    ) -> npt.NDArray[Any]:
        # Not ascontiguousarray: that gives a number a dimension.
        return np.array(values, types[self._entries[name].type], order="C")

    def _check(self, caches: tuple[CacheSpec, ...]) -> None:
        names = self.interface
        roles = {entry.name: entry.role for entry in names.fed}
        known = {names.tokens, names.attention_mask, names.position_ids, *roles}
        known |= {spec.pair.past for spec in caches} | {pair.past for pair in names.states}
        known |= {*PACKING, LOGITS_INDICES} if self._block_size else set()
        unknown = [name for name in self._entries if name not in known]
        if unknown:
            raise UnsupportedModelError(
                f"the model has inputs that a text decoder does not have: {', '.join(unknown)}"
            )
        tokens = _INTEGERS if self._embeddings is None else FLOATS
        masks = {**_INTEGERS, **_FLAGS}
        expected: list[tuple[str | None, dict[str, Any], int | None]] = [
            (names.tokens, tokens, 1 if self._block_size else 2 if self._embeddings is None else 3),
            (names.attention_mask, masks, 2),
            (names.position_ids, _INTEGERS, 2),
        ]
        for fed, role in roles.items():
            types = {VISIBLE: {**_FLAGS, **FLOATS}, IGNORED: _ANY, ENCODER: _ANY}.get(
                role, _INTEGERS
            )
            expected.append((fed, types, 4 if role == VISIBLE else None))
        for name, types, rank in expected:
            if name is None:
                continue
            entry = self._entries.get(name)
            if entry is None or entry.type not in types:
                raise UnsupportedModelError(
                    f"the input has type {'missing' if entry is None else entry.type}, not "
                    + " or ".join(key.removeprefix("tensor(").rstrip(")") for key in types),
                    where=name,
                )
            if rank is not None and len(entry.shape) != rank:
                raise UnsupportedModelError(
                    f"the input has rank {len(entry.shape)}, not {rank}", where=name
                )
