"""Ways to feed the caches of the trained model: none may change what it says or stores."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.trained.conftest import Pairs
from tests.trained.pair import ONE_ROUTE
from tq_onnx.measure.expose_internals import expose_internals
from tq_onnx.measure.feeding_modes import all_caches
from tq_onnx.measure.probe import Probe

Array = npt.NDArray[Any]

pytestmark = pytest.mark.usefixtures("exact_products")

# Share of bytes that may differ because a code lies on a boundary. Prompts and single tokens add up
# in another order, so vectors of later layers differ by 1e-7; measured 1.6e-4, a token at a time.
MAX_TIES = 5e-4


@pytest.mark.parametrize("route", ONE_ROUTE)
@pytest.mark.parametrize(("chunk", "preset"), [(1, "int4"), (48, "mse4"), (199, "int4")])
def test_a_prompt_in_chunks_leaves_the_same_bytes(
    pairs: Pairs, route: str, chunk: int, preset: str
) -> None:
    """With an exact window the first queries of a chunk find entries that it has overwritten."""
    pair = pairs(route, preset)
    probe = expose_internals(pair.converted)
    prompt = pair.heldout[:200]
    whole, pieces = _fed(probe, prompt, len(prompt)), _fed(probe, prompt, chunk)
    differing = total = equal = 0
    for (vectors, rows), (others, found) in zip(whole, pieces, strict=True):
        # onnxruntime may round a product of another shape differently: then, and only then, may a
        # code that lies on a boundary fall on its other side.
        same = (vectors == others).all(axis=-1)
        assert np.array_equal(rows[same], found[same])
        equal += int(same.sum())
        differing += int((rows != found).sum())
        total += rows.size
    assert total == 200 * pair.after.signature.bytes_per_token
    assert differing <= MAX_TIES * total
    assert equal > 0


def _fed(probe: Probe, prompt: npt.NDArray[np.int64], chunk: int) -> list[tuple[Array, Array]]:
    """What each encode node was given, ``[1, N, S, D]``, and what it left, ``[1, N, S, W]``."""
    decoder = probe.decoder(library=True, threads=2)
    names = [part.vectors for layer in probe.layers for part in (layer.key, layer.value)]
    given: dict[str, list[Array]] = {name: [] for name in names}
    for start in range(0, len(prompt), chunk):
        decoder.prefill(prompt[None, start : start + chunk])
        for name in names:
            given[name].append(decoder.watched[name])
    vectors = [np.concatenate(parts, axis=2) for parts in given.values()]
    return list(zip(vectors, all_caches(decoder), strict=True))
