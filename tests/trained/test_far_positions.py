"""Keys of the trained model at positions that no test can read a text to: as good as early ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.ops.site import Site
from tests.parity.backends import LEVELS, run
from tests.parity.compare import check_attention
from tests.trained.conftest import Pairs
from tq_onnx.codec import reference
from tq_onnx.codec.calibration import Calibration, LayerStatistics
from tq_onnx.integrations.tokens import calibration_text
from tq_onnx.quality.calibrate import calibrate

Array = np.ndarray[Any, Any]

TOKENS, CALIBRATED = 1020, 8192
EARLY = 1024
FAR = (16_384, 1_048_576)
MOST_WORSE = 1.02


@dataclass(frozen=True)
class Recorded(Site):
    """A layer with one KV head and the offset of a calibration."""

    mean: Any = None

    def offset(self, name: str) -> Array:
        return self.mean if name == "key" else np.zeros((1, 1, self.head_size), np.float32)


@pytest.fixture(scope="module")
def statistics(pairs: Pairs) -> dict[int, Calibration]:
    """By the longest window."""
    pair = pairs("dynamo")
    text = np.asarray(pair.tokenizer.encode(calibration_text()), np.int64)[:CALIBRATED]
    return {
        context: calibrate(pair.original, text, context=context, threads=1)
        for context in (512, 2048)
    }


@pytest.fixture(scope="module")
def keys(pairs: Pairs) -> list[Array]:
    """What the layers cache of a text that nothing was calibrated on, ``[N, T, D]``."""
    decoder = pairs("dynamo").before.decoder()
    decoder.prefill(pairs("dynamo").heldout[None, :EARLY])
    return [decoder.cache(2 * layer)[0] for layer in range(4)]


def as_if_at(position: int, layer: LayerStatistics, keys: Array) -> Array:
    """The last keys, were the first of them there: turned by angles in float32, as in the graph."""
    assert layer.rotary is not None
    assert layer.frequencies is not None
    still = layer.rotary.unturned(keys, 0)[:, -TOKENS:]
    positions = np.arange(position, position + TOKENS, dtype=np.float32)
    angles = positions[:, None] * layer.frequencies
    partner, sign = layer.rotary.partners
    turned: Array = still * np.cos(angles) - still[..., partner] * (sign * np.sin(angles))
    return turned.astype(np.float32)


def error_at(
    position: int, layer: LayerStatistics, keys: Array, level: str, rng: np.random.Generator
) -> float:
    """Squared error of the rows that the kernel makes of keys; its attention has to agree."""
    assert layer.k_turned_mean is not None
    assert layer.frequencies is not None
    mean = layer.k_turned_mean[:, :1].astype(np.float32)
    head = as_if_at(position, layer, keys)[None, :1]
    site = Recorded(
        heads=2,
        kv_heads=1,
        head_size=head.shape[-1],
        offset_rows=1,
        frequencies=tuple(layer.frequencies.tolist()),
        mean=mean,
    )
    feeds = site.feeds(rng, past_length=(0,), new=TOKENS)
    width = feeds["past_key"].shape[-1]
    past = np.zeros((1, 1, position, width), np.uint8)
    feeds |= {"key": head, "past_key": past, "past_value": past}
    feeds["past_length"] = np.array([position])
    options = {"sliding_window": TOKENS, "scale": head.shape[-1] ** -0.5}
    attended, *presents = run(level, site.model(**options).SerializeToString(), feeds)
    rows = [present[:, :, position:] for present in presents]
    codebook = site.codebook(site.key)
    coded = reference.decode(rows[0], site.key, site.key_rotation, codebook)
    values = reference.decode(rows[1], site.value, site.value_rotation, codebook)
    added = site.taken(feeds, "key", mean)
    # The last query sees the new keys, and no others.
    last = feeds["query"][:, :, -1:].astype(np.float64)
    scores = last @ (coded + added).swapaxes(2, 3) * options["scale"]
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    expected = weights / weights.sum(axis=-1, keepdims=True) @ values
    check_attention("float32", attended[:, :, -1:], expected)
    return float(((head - added - coded) ** 2).sum())


@pytest.mark.parametrize("level", LEVELS)
def test_rows_are_as_good_at_any_position(
    statistics: dict[int, Calibration], keys: list[Array], level: str
) -> None:
    """And attention adds what was taken, computed in float64 here and in float32 there."""
    errors = [
        sum(
            error_at(position, layer, recorded, level, np.random.default_rng(4))
            for layer, recorded in zip(statistics[512].layers, keys, strict=True)
        )
        for position in (EARLY, *FAR)
    ]
    assert max(errors) < MOST_WORSE * errors[0], errors
    assert min(errors) > errors[0] / MOST_WORSE, errors


def test_short_windows_are_enough(statistics: dict[int, Calibration], keys: list[Array]) -> None:
    """The squared error of codes is in proportion to what a mean leaves of keys."""
    left: dict[int, float] = {}
    for context, known in statistics.items():
        left[context] = 0.0
        for layer, recorded in zip(known.layers, keys, strict=True):
            assert layer.rotary is not None
            assert layer.k_turned_mean is not None
            still = layer.rotary.unturned(recorded, 0)[:, 4:]
            left[context] += float(((still - layer.k_turned_mean[0][:, None]) ** 2).sum())
    assert left[512] < 1.01 * left[2048]
    energy = sum(float((recorded[:, 4:].astype(np.float64) ** 2).sum()) for recorded in keys)
    assert left[512] < 0.45 * energy
