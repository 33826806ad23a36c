"""Measure how much outliers in norm weights, as in trained Qwen3, add to the loss of a conversion.

Some channels of keys of trained models are many times as large as the others, because of the
weights of the norms in front of them, and quantised keys suffer by that. Here a few RoPE pairs of
channels of each layer get keys that are 16 to 64 times as large, and queries that are as much
smaller: scores stay what they were, up to rounding. So the converted model is measured against the
predictions of the original as it is, beside the same conversion without outliers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import onnx_ir as ir

from tq_onnx.conversion.bake import bake_metadata
from tq_onnx.conversion.equalise import fold, layer_scales
from tq_onnx.conversion.headnorms import LayerNorms, NoNorms, find_norms
from tq_onnx.conversion.options import Options
from tq_onnx.conversion.original import recognise_original
from tq_onnx.conversion.rewrite import ConvertPass
from tq_onnx.conversion.scales import adapt
from tq_onnx.conversion.unpaged import load
from tq_onnx.measure.divergence import QualityFigures
from tq_onnx.plan import CPU, Plan
from tq_onnx.runtime.model import OpenModel
from tq_onnx.runtime.session import make_session
from tq_onnx.runtime.signature import signature_of

PAIRS: Final = 6
"""RoPE pairs of each layer that become outliers."""
SMALLEST: Final = 16
LARGEST: Final = 64
_ROUNDING: Final = 1e-9


@dataclass(frozen=True)
class OutlierFigures:
    """The same conversion of the model with outliers in its norm weights.

    Attributes:
        perplexity_change: relative change of the perplexity, from the original's.
        kl_mean: mean KL divergence from the original's predictions, in nats.
        kl_error: standard error of the mean, if positions are independent.
        relative_kl: ``kl_mean`` divided by that of the conversion without outliers; None if that is
            only rounding.
    """

    perplexity_change: float
    kl_mean: float
    kl_error: float
    relative_kl: float | None


def compared(outlier_figures: QualityFigures, clean: QualityFigures) -> OutlierFigures:
    """Return the figures of a conversion with outliers beside those of the same without."""
    return OutlierFigures(
        perplexity_change=outlier_figures.perplexity_change,
        kl_mean=outlier_figures.kl_mean,
        kl_error=outlier_figures.kl_error,
        relative_kl=outlier_figures.kl_mean / clean.kl_mean if clean.kl_mean > _ROUNDING else None,
    )


def open_with_outliers(
    original: Path, plan: Plan, *, library: bool = True, threads: int | None = None
) -> OpenModel | None:
    """Convert an original with outliers as another plan says, in memory, and open the result.

    Args:
        original: the original; it is not changed.
        plan: of a conversion of it.
        library: whether the model runs on the library's kernels; if not, on its bodies.
        threads: threads within an operator.

    Returns:
        The model; None where statistics of the model as it is went into the conversion, where it is
        for another target, and where no norm weights are found.

    Raises:
        TqOnnxError: the model or the library is refused.
    """
    if plan.centered or plan.target != CPU:
        return None
    loaded = load(original)
    recognition = recognise_original(loaded, original).recognition
    model = loaded.model
    plain = replace(
        plan, layers=tuple(replace(layer, equalised="", adaptation="") for layer in plan.layers)
    )
    ConvertPass(plain, recognition)(model)
    norms = find_norms(model, plain)
    options = Options(equalize=None if _equalises(plan, norms) else False)
    if not _put_outliers(model, norms):
        return None
    adapted, _ = adapt(model, plain, options, None)
    bake_metadata(model, adapted)
    session = make_session(
        ir.to_proto(model).SerializeToString(),
        library=library,
        threads=threads,
        external_data=loaded.path.parent,
    )
    return OpenModel(original, session, signature_of(session, adapted))


def _equalises(plan: Plan, layer_norms: Sequence[LayerNorms | NoNorms]) -> bool:
    """Return whether scales were wanted: not if there was a place for them and they are not there.

    Args:
        plan: of the conversion.
        layer_norms: the norms of all its layers.
    """
    if any(layer.equalised for layer in plan.layers):
        return True
    return not any(
        isinstance(norms, LayerNorms)
        and layer.key.codec.is_rotated
        and bool((layer_scales(norms) != 1).any())
        for norms, layer in zip(layer_norms, plan.layers, strict=True)
    )


def _put_outliers(model: ir.Model, layer_norms: Sequence[LayerNorms | NoNorms]) -> bool:
    """Change the norm weights of a converted model; return False if there are none."""
    rng = np.random.default_rng(0)
    changed = False
    for norms in layer_norms:
        if isinstance(norms, NoNorms):
            continue
        groups = np.unique(norms.groups)
        chosen = rng.choice(groups, min(PAIRS, len(groups)), replace=False)
        sizes = np.exp2(rng.uniform(np.log2(SMALLEST), np.log2(LARGEST), len(chosen)))
        if norms.halves:  # nothing is rounded
            sizes = np.exp2(np.rint(np.log2(sizes)))
        factor = np.ones(len(norms.groups))
        for group, size in zip(chosen, sizes, strict=True):
            factor[norms.groups == group] = size
        fold(model, norms, 1 / factor)
        changed = True
    return changed
