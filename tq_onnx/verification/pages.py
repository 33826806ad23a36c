"""Packed requests of a model whose caches lie in pages, against the original.

The original reads each request alone. The model reads them packed, prompts, pieces of prompts and
single tokens in one call, with pages in a random order. Without its codecs, which are taken out in
memory, it must compute the same, to float noise; with them, other pages must give the same bits.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from tq_onnx.errors import UsageError
from tq_onnx.files.load import LoadedModel
from tq_onnx.measure.rawform import multiply_floats, raw_form
from tq_onnx.measure.readings import distance
from tq_onnx.measure.windows import Ids
from tq_onnx.plan import (
    BLOCK_TABLE,
    CUMULATIVE_LENGTHS,
    LOGITS_INDICES,
    PAST_LENGTHS,
    Plan,
    plan_in,
)
from tq_onnx.runtime.cache import pages_of
from tq_onnx.runtime.feeding import FLOATS
from tq_onnx.runtime.model import OpenModel
from tq_onnx.runtime.session import make_session
from tq_onnx.verification.checks import ROUNDING_BY_CALL, PropertyCheck
from tq_onnx.verification.fidelity import MAX_REWRITE_ERROR, MAX_ROUNDED_ERROR

CALLS: Final[Sequence[Mapping[int, int]]] = (
    {0: 19, 1: 3},
    {0: 1, 2: 24, 1: 1},
    {1: 14, 2: 1, 3: 1},
    {2: 1, 1: 1, 0: 1, 3: 7},
    {3: 1, 0: 1},
)
"""New tokens of requests, call by call."""
_TOKENS: Final = {
    request: sum(call.get(request, 0) for call in CALLS) for call in CALLS for request in call
}
_BLOCKS: Final = 12
_NO_PAGE: Final = -1
"""In the places of a table that have no page."""
Logits = npt.NDArray[Any]


def packed_requests(
    loaded: LoadedModel,
    plan: Plan,
    text: Ids,
    expected: Logits,
    *,
    library: bool = True,
    threads: int | None = None,
) -> list[PropertyCheck]:
    """Compare packed requests with those that an original read alone.

    Args:
        loaded: the converted model; it is not changed.
        text: ids ``[n]``.
    """
    opened = partial(
        make_session, library=library, threads=threads, external_data=loaded.path.parent
    )
    raw = raw_form(loaded, plan).model
    raw_plan = plan_in(raw.metadata_props)
    assert raw_plan is not None  # the raw form is a conversion
    found = together(opened(_bytes(raw)), raw_plan, text)
    session = opened(_bytes(loaded.model))
    first, second = (together(session, plan, text, seed=seed) for seed in (0, 1))
    return [_same(expected, found, plan, raw), _same_bits(first, second)]


def alone(before: OpenModel, text: Ids) -> Logits:
    """Return the logits ``[n, V]`` of an original after the tokens of each call, by request."""
    texts = _texts(text)
    decoders = {name: before.decoder() for name in texts}
    rows = []
    for call in _pieces(texts):
        for name, ids in call.items():
            rows.append(np.asarray(decoders[name].prefill(ids[None]), np.float64)[0, -1])
    return np.stack(rows)


def _texts(text: npt.NDArray[np.int64]) -> dict[int, npt.NDArray[np.int64]]:
    """Return the tokens of each request, from places all over a text."""
    starts = np.linspace(0, len(text), len(_TOKENS), endpoint=False).astype(int)
    return {
        request: np.resize(text[start:], count)
        for start, (request, count) in zip(starts, _TOKENS.items(), strict=True)
    }


def _pieces(
    text: Mapping[int, npt.NDArray[np.int64]],
) -> Iterator[dict[int, npt.NDArray[np.int64]]]:
    """Yield the new tokens of each call."""
    fed = dict.fromkeys(text, 0)
    for call in CALLS:
        yield {name: text[name][fed[name] : fed[name] + count] for name, count in call.items()}
        fed |= {name: fed[name] + count for name, count in call.items()}


def together(session: Any, plan: Plan, text: Ids, *, seed: int = 0) -> Logits:
    """Return the same of packed requests, in a session of a paged model."""
    blocks = sum(-(-count // plan.block_size) for count in _TOKENS.values()) + _BLOCKS
    decoder = PagedDecoder(session, plan, blocks=blocks, seed=seed)
    rows = [decoder.run(call) for call in _pieces(_texts(text))]
    return np.concatenate(rows).astype(np.float64)


def _same(expected: Logits, found: Logits, plan: Plan, raw: ir.Model) -> PropertyCheck:
    name = "all but the codecs computes what the original does, request by request"
    is_rounded = any(node.op_type in {*ROUNDING_BY_CALL, "QMoE"} for node in raw.graph)
    bound = max(MAX_REWRITE_ERROR[layer.dtype] for layer in plan.layers)
    bound = max(bound, MAX_ROUNDED_ERROR if is_rounded else 0.0)
    worst = max(distance(one, other) for one, other in zip(expected, found, strict=True))
    detail = (
        f"largest relative distance {worst:.1e} in {len(expected)} answers, {bound:.0e} allowed"
    )
    return PropertyCheck(name, worst <= bound, detail)


def _same_bits(one: Logits, other: Logits) -> PropertyCheck:
    name = "pages in another order give the same bits"
    differing = int((one != other).any(axis=-1).sum())
    return PropertyCheck(name, not differing, f"{differing} of {len(one)} answers differ")


def _bytes(model: ir.Model) -> bytes:
    content: bytes = ir.to_proto(multiply_floats(model)).SerializeToString()
    return content


class PagedDecoder:
    """The caches of a paged model, and the requests in them, in calls of any make-up.

    Args:
        blocks: pages of each cache.
        seed: pages are given out in a random order, and hold random bytes at first.
    """

    def __init__(self, session: Any, plan: Plan, *, blocks: int, seed: int = 0) -> None:
        """Make caches of random bytes; see the class for arguments."""
        rng = np.random.default_rng(seed)
        self._session = session
        self._plan = plan
        self._free = [int(number) for number in rng.permutation(blocks)]
        self._lengths: dict[Hashable, int] = {}
        self._pages: dict[Hashable, list[int]] = {}
        shapes = {port.name: port.shape for port in session.get_inputs()}
        self._caches = {
            pair.present: rng.integers(0, 256, (blocks, *shapes[pair.past][1:]), np.uint8)
            for pair in plan.caches
        }
        states = plan.interface.states
        types = {port.name: FLOATS.get(port.type) for port in session.get_inputs()}
        self._begin = {
            pair.present: np.zeros(shapes[pair.past][1:], types[pair.past]) for pair in states
        }
        self._states: dict[Hashable, dict[str, npt.NDArray[Any]]] = {}

    def run(self, tokens: Mapping[Any, Sequence[int] | npt.NDArray[np.int64]]) -> Logits:
        """Feed new tokens of some requests, and return logits ``[R, V]`` of their last ones."""
        lengths = {name: self._lengths.get(name, 0) for name in tokens}
        after = {name: lengths[name] + len(new) for name, new in tokens.items()}
        pages = [self._pages_for(name, count) for name, count in after.items()]
        bounds = np.cumsum([0, *map(len, tokens.values())]).astype(np.int32)
        feeds = {
            self._plan.interface.tokens: np.concatenate(
                [np.asarray(new, np.int64) for new in tokens.values()]
            ),
            CUMULATIVE_LENGTHS: bounds,
            LOGITS_INDICES: bounds[1:] - 1,
            PAST_LENGTHS: np.array(list(lengths.values()), np.int32),
            BLOCK_TABLE: np.array([*zip_longest(*pages, fillvalue=_NO_PAGE)], np.int32).T.copy(),
            **{pair.past: self._caches[pair.present] for pair in self._plan.caches},
        }
        before = [self._states.get(name, self._begin) for name in tokens]
        for pair in self._plan.interface.states:
            feeds[pair.past] = np.stack([state[pair.present] for state in before])
        names = [self._plan.interface.logits, *self._begin, *self._caches]
        logits, *presents = self._session.run(names, feeds)
        count = len(self._begin)
        for row, name in enumerate(tokens):
            rows = (state[row] for state in presents[:count])
            self._states[name] = dict(zip(self._begin, rows, strict=True))
        self._caches = dict(zip(self._caches, presents[count:], strict=True))
        self._lengths |= after
        last_logits: Logits = logits
        return last_logits

    def _pages_for(self, request: Hashable, tokens: int) -> list[int]:
        """Return the pages of a request, with further ones if it needs them."""
        pages = self._pages.setdefault(request, [])
        missing = pages_of(tokens, self._plan.block_size) - len(pages)
        if missing > len(self._free):
            raise UsageError(f"{missing} pages are needed, and {len(self._free)} are free")
        pages += [self._free.pop() for _ in range(missing)]
        return pages
