"""Ways to feed the caches of the trained model: none may change what it says or stores."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.trained.conftest import Pairs
from tests.trained.pair import ONE_ROUTE
from tq_onnx.measure.expose_internals import expose_internals
from tq_onnx.measure.feeding_modes import all_caches, compare_feeding_modes
from tq_onnx.measure.probe import Probe
from tq_onnx.runtime.opening import open_converted

Array = npt.NDArray[Any]

pytestmark = pytest.mark.usefixtures("exact_products")

# Share of bytes that may differ because a code lies on a boundary. Prompts and single tokens add up
# in another order, so vectors of later layers differ by 1e-7; measured 1.6e-4, a token at a time.
MAX_TIES = 5e-4


@pytest.mark.parametrize("route", ONE_ROUTE)
def test_in_place_and_growing_caches_give_the_same_tokens(pairs: Pairs, route: str) -> None:
    pair = pairs(route)
    figures, _ = compare_feeding_modes(pair.after, pair.heldout[:200], new_tokens=24, chunk=48)
    assert figures.fixed_capacity
    assert figures.in_place_tokens_equal
    assert figures.in_place_bytes_differing == 0


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


@pytest.mark.parametrize("route", ONE_ROUTE)
def test_in_place_is_one_buffer(pairs: Pairs, route: str) -> None:
    """The kernels write new rows only: the same buffer, and every other byte of it untouched."""
    pair = pairs(route)
    decoder = pair.after.decoder(capacity=64)
    room = decoder.cache_bytes
    decoder.prefill(pair.heldout[None, :40])
    before = all_caches(decoder)
    decoder.step([int(pair.heldout[40])])
    rows = 64 + 144  # of the exact window
    assert decoder.cache_bytes == room == rows * pair.after.signature.bytes_per_token
    for old, new in zip(before, all_caches(decoder), strict=True):
        assert new.shape[2] == 41
        assert np.array_equal(new[:, :, :40], old)
        assert new[:, :, 40].any()


def test_bodies_take_caches_of_fixed_capacity_too(pairs: Pairs) -> None:
    pair = pairs("dynamo")
    bodies = open_converted(pair.converted, library=False, threads=2)
    figures, _ = compare_feeding_modes(bodies, pair.heldout[:48], new_tokens=8, chunk=16)
    assert figures.in_place_tokens_equal
    assert figures.in_place_bytes_differing == 0
