"""What the caches of one batch hold: read, shortened, copied, put back.

A graph that takes more sequences than there are gets each as often as needed: buffers and states
have ``copies`` of a sequence, and what is read from them is one of each.

All that changes is one ``State``, which is replaced as a whole: whatever interrupts a call, the
caches hold what they held before it or what they hold after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tq_onnx.errors import UnsupportedModelError, UsageError
from tq_onnx.runtime import arguments
from tq_onnx.runtime.buffers import CacheBuffers
from tq_onnx.runtime.signature import Signature
from tq_onnx.runtime.snapshot import Snapshot


@dataclass(frozen=True, eq=False)
class State:
    """What a decoder holds at one moment."""

    caches: CacheBuffers  #: the buffers that the next call reads
    mask: npt.NDArray[np.int64]  #: ``[B, length]``, 0 for padding
    recurrent: dict[str, npt.NDArray[Any]]  #: states of recurrent layers, by their inputs


class Contents:
    """Cache buffers, states and attention mask of one batch.

    Args:
        batch: B, sequences decoded together.
        copies: of each sequence in a call.
        capacity: tokens that the caches hold; None if they grow.
        in_place: whether a call writes new rows into buffers of one size.
        alias: whether one buffer may be past and present then.
        first_states: gives the states before the first token, for a number of rows.
    """

    def __init__(
        self,
        signature: Signature,
        *,
        batch: int,
        copies: int,
        capacity: int | None,
        device: str,
        in_place: bool,
        alias: bool,
        first_states: Callable[[int], dict[str, npt.NDArray[Any]]],
        where: str,
    ) -> None:
        """Allocate empty caches; see the class for arguments."""
        self.signature = signature
        self.batch = batch
        self.capacity = capacity
        self.where = where
        self._copies = copies
        self._device = device
        self._in_place = in_place
        self._alias = alias
        self._grows = capacity is None and not signature.is_enlarged
        self._first_states = first_states
        self.reset()

    def reset(self) -> None:
        """Forget everything: empty caches of the same kind."""
        states = self._first_states(self.batch * self._copies)
        self._state = State(self._buffers(), np.ones((self.batch, 0), np.int64), states)

    def _buffers(self) -> CacheBuffers:
        """Return empty buffers."""
        return CacheBuffers(
            self.signature.caches,
            self.batch * self._copies,
            self.capacity or 0,
            self._device,
            swapping=self._in_place and not self._alias,
        )

    @property
    def _caches(self) -> CacheBuffers:
        return self._state.caches

    @property
    def length(self) -> int:
        """Tokens per sequence in the caches, padding included."""
        return int(self._state.mask.shape[1])

    @property
    def slots(self) -> int:
        """Tokens that the caches have room for as they are now."""
        return self._caches.slots

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache buffers as they are now."""
        return self._caches.nbytes // self._copies

    def cache(self, index: int) -> npt.NDArray[Any]:
        """Copy the rows of the tokens ``[B, N, length, row]`` of one cache, in signature order."""
        return self.signature.caches[index].of_tokens(self.plane(index))[:, :, : self.length]

    def plane(self, index: int, start: int = 0) -> npt.NDArray[Any]:
        """Copy the used part of one cache from a token on, with the rows of exact tokens."""
        return np.ascontiguousarray(self._own(self._caches.plane(index, self.length, start)))

    def rewind(self, length: int) -> None:
        """Forget all but the first tokens.

        Tokens of an exact window that were overwritten since are read by their codes then.

        Args:
            length: tokens per sequence that are kept.
        """
        if arguments.count(length, "length") > self.length:
            raise UsageError(f"caches of {self.length} tokens cannot go back to {length}")
        if length == self.length:
            return
        if not length:
            self.reset()
            return
        self.refuse_states()
        caches = self._caches
        # Buffers with room to spare keep it; what lies behind the tokens is never read.
        if self.capacity is None and not self.signature.is_enlarged:
            caches = caches.shortened(length)
        self._state = replace(self._state, caches=caches, mask=self._state.mask[:, :length])

    def refuse_states(self) -> None:
        """Refuse a model with states, which cannot go back to fewer tokens."""
        if self.signature.interface.states:
            raise UnsupportedModelError(
                "recurrent layers cannot go back to fewer tokens",
                where=self.where,
                fix="begin with an empty cache",
            )

    def snapshot(self, start: int = 0) -> Snapshot:
        """Copy what the caches hold, of tokens from ``start`` on."""
        planes = tuple(self.plane(index, start) for index in range(len(self.signature.caches)))
        recurrent = self._state.recurrent
        states = {name: self._own(np.array(value)) for name, value in recurrent.items()}
        return Snapshot(planes, np.array(self._state.mask[:, start:]), states)

    def restore(self, held: Snapshot) -> None:
        """Put the contents of caches in the place of those of these.

        Args:
            held: from a decoder of the same model and batch; it is not changed.
        """
        batch, length = held.mask.shape
        if batch != self.batch:
            raise UsageError(f"caches of {batch} sequences are no caches of {self.batch}")
        if self.capacity is not None and length > self.capacity:
            raise UsageError(
                f"{length} tokens do not fit into caches with a capacity of {self.capacity}",
                fix="raise the capacity",
            )
        caches = self._buffers().restored([self._repeated(plane) for plane in held.planes])
        states = {name: self._repeated(value) for name, value in held.states.items()}
        self._state = State(caches, np.array(held.mask), states)

    def repeat(self, length: int) -> None:
        """Fill the caches with copies of the rows that they hold.

        That is no context that means anything, but one to measure speed with: where it does not
        matter what a cache holds, a long one is there at once.

        Args:
            length: tokens per sequence afterwards.
        """
        most = length if self.capacity is None else self.capacity
        if not 0 < self.length <= length <= most:
            raise UsageError(f"{self.length} tokens cannot become {length} in caches of {most}")
        self._caches.repeat(self.length, length)
        new = np.ones((self.batch, length - self.length), np.int64)
        mask = np.concatenate([self._state.mask, new], axis=1)
        self._state = replace(self._state, mask=mask)

    def _repeated(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Repeat every sequence as often as the graph needs it."""
        if self._copies == 1 or values.ndim == 0 or values.shape[0] != self.batch:
            return values
        return np.repeat(values, self._copies, axis=0)

    def _own(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Undo ``_repeated``: return one of each."""
        if self._copies == 1 or values.ndim == 0 or values.shape[0] != self.batch * self._copies:
            return values
        return values[:: self._copies]
