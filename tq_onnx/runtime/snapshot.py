"""What the caches of a decoder hold, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tq_onnx.runtime.cache import CacheSpec
from tq_onnx.runtime.feeding import Tokens


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The contents of a decoder's caches."""

    #: the rows in use of each cache ``[B, N, used, row]``, in signature order; those of an exact
    #: window are the first
    planes: tuple[npt.NDArray[Any], ...]
    mask: Tokens  #: ``[B, length]``, 0 for padding
    states: dict[str, npt.NDArray[Any]]  #: of recurrent layers, by their inputs


def joined(parts: Sequence[Snapshot], specs: Sequence[CacheSpec]) -> Snapshot:
    """Join contents of tokens in their order; exact tokens and states are the last ones'."""
    planes = (
        spec.joined([part.planes[index] for part in parts]) for index, spec in enumerate(specs)
    )
    mask = np.concatenate([part.mask for part in parts], axis=1)
    return Snapshot(tuple(planes), mask, parts[-1].states)
