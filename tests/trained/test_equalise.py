"""Outliers in the norm weights ruin 4-bit keys, and scales of queries and keys undo it.

The bundled model gets a few RoPE pairs of channels whose keys are 16 to 64 times as large, as they
are in trained Qwen3, and whose queries are as much smaller: the float model is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
import pytest

from tests.trained.conftest import Pairs
from tests.trained.outliers import write_with_outliers
from tests.trained.pair import ONE_ROUTE, Pair
from tq_onnx.codec.presets import PRESETS
from tq_onnx.conversion.bake import bake_metadata
from tq_onnx.conversion.equalise import UNSAFE_NOISE, LayerEqualisation
from tq_onnx.conversion.options import Options
from tq_onnx.conversion.planning import make_plan
from tq_onnx.conversion.rewrite import ConvertPass
from tq_onnx.conversion.scales import adapt
from tq_onnx.files.load import load
from tq_onnx.measure import divergence
from tq_onnx.measure.divergence import QualityFigures
from tq_onnx.recognise.match import recognise
from tq_onnx.runtime.model import OpenModel
from tq_onnx.runtime.opening import open_converted, open_original

TOKENS = 1024
LAYERS = 4
#: What int4 costs may grow by this, and no more; measured: none in four digits.
AS_CLEAN = 1.1


@dataclass(frozen=True, eq=False)
class Models:
    """The clean export, and one with outliers beside it."""

    pair: Pair
    spoilt: Path

    def kl(self, model: OpenModel) -> QualityFigures:
        """Against the clean original."""
        return divergence.compare(
            self.pair.before.decoder(),
            model.decoder(),
            self.pair.heldout[:TOKENS],
            vocabulary=self.pair.before.vocabulary,
            context=512,
            stride=504,
        )


@pytest.fixture(scope="module", params=ONE_ROUTE)
def models(request: pytest.FixtureRequest, pairs: Pairs) -> Models:
    pair = pairs(request.param)
    spoilt = pair.original.with_name("spoilt.onnx")
    write_with_outliers(pair.original, spoilt)
    return Models(pair, spoilt)


def converted(original: Path, *, scaled: bool) -> tuple[OpenModel, tuple[LayerEqualisation, ...]]:
    """An original in int4, on the kernels; exact tokens would hide what scales do."""
    model = load(original).model
    found = recognise(model)
    plan = make_plan(found, PRESETS["int4"], Options(residual_length=0, sink_tokens=0))
    ConvertPass(plan, found)(model)
    plan, report = adapt(model, plan, Options(equalize=scaled), None)
    bake_metadata(model, plan)
    path = original.with_name(f"{original.stem}-{'scaled' if scaled else 'plain'}.onnx")
    ir.save(model, path)
    return open_converted(path, threads=2), report


def test_scales_bring_the_clean_model_back(models: Models) -> None:
    assert models.kl(open_original(models.spoilt, threads=2)).kl_mean < 1e-9
    clean, _ = converted(models.pair.original, scaled=False)
    plain, _ = converted(models.spoilt, scaled=False)
    scaled, report = converted(models.spoilt, scaled=True)
    before, ruined, after = (models.kl(model) for model in (clean, plain, scaled))
    assert before.kl_mean > 1e-4
    assert ruined.kl_mean > 100 * before.kl_mean
    assert ruined.perplexity_change > 0.3
    assert after.kl_mean <= AS_CLEAN * before.kl_mean
    assert abs(after.perplexity_change) < 0.01
    for layer in report:
        assert layer.noise_before is not None and layer.noise_after is not None
        assert layer.noise_after < UNSAFE_NOISE < layer.noise_before
        assert layer.scaled and not layer.unsafe
        assert layer.gain is not None and layer.gain > 50


def test_scales_do_not_harm_a_clean_model(models: Models) -> None:
    plain, _ = converted(models.pair.original, scaled=False)
    scaled, report = converted(models.pair.original, scaled=True)
    assert models.kl(scaled).kl_mean <= AS_CLEAN * models.kl(plain).kl_mean
    assert [layer.layer for layer in report] == [*range(LAYERS)]
    assert all(layer.gain is not None and 1 <= layer.gain < 1.1 for layer in report)
