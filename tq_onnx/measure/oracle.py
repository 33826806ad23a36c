"""The oracle: kernels and function bodies against the numpy reference, node by node.

Every TurboQuant node of the exposed layers is judged on its own inputs, taken from the running
model:

- encode: codes and fields of the new rows against ``codec.reference.encode``
  (``tq_onnx.measure.rowcomparison``);
- attention: the result against float64 attention over the decoded cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tq_onnx.codec import reference
from tq_onnx.measure.probe import LayerNames
from tq_onnx.measure.rowcomparison import ELEMENTS, compare_rows
from tq_onnx.runtime.decoder import Decoder

KERNEL: Final = "kernel"
BODY: Final = "function body"
DEVICE: Final = "kernel on {}"
"""Name of the backend that an execution provider with its own memory is."""

ORACLE_QUERIES: Final = 32

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class OracleFigures:
    """One backend against the reference, on one layer.

    Attributes:
        layer: index of the layer.
        backend: ``KERNEL`` or ``BODY``.
        codes: codes compared, keys and values.
        codes_differing: codes that differ.
        codes_wrong: those among them that are no boundary ties.
        scale_steps: largest distance of a field, in steps of its type.
        attention_error: largest absolute error over the largest absolute value of the result.
    """

    layer: int
    backend: str
    codes: int
    codes_differing: int
    codes_wrong: int
    scale_steps: int
    attention_error: float


def judge_layer(
    decoder: Decoder, layer: LayerNames, backend: str
) -> tuple[OracleFigures, tuple[Array, Array]]:
    """Judges one layer on the decoder's last call.

    Args:
        decoder: from ``Probe.decoder``, after a call.
        layer: what to look at.
        backend: what runs the nodes: ``KERNEL`` or ``BODY``.

    Returns:
        The figures, and the caches' used parts: key rows and value rows ``[1, N, S, W]``.
    """
    seen = decoder.watched
    length = np.asarray(seen[layer.key.past_length], np.int64).reshape(-1)
    caches = _cache(decoder, layer.plan.key.present), _cache(decoder, layer.plan.value.present)
    found = [
        compare_rows(
            cache[:, :, int(length[0]) :],
            seen[names.vectors],
            names,
            length,
            layer.plan.dtype,
            body=backend == BODY,
        )
        for names, cache in zip((layer.key, layer.value), caches, strict=True)
    ]
    query, output = seen[layer.query], seen[layer.output]
    # The last queries see the most keys; the oracle is slow, so it answers no more than these.
    skip = max(0, query.shape[2] - ORACLE_QUERIES)
    bias = None if layer.bias is None else seen[layer.bias]
    if bias is not None and bias.shape[2] > 1:
        bias = bias[:, :, skip:]
    expected = reference.attention(
        query[:, :, skip:],
        *caches,
        length + skip,
        key=layer.key.codec,
        value=layer.value.codec,
        key_rotation=layer.key.rotation,
        key_codebook=layer.key.centroids,
        value_rotation=layer.value.rotation,
        value_codebook=layer.value.centroids,
        scale=layer.plan.scale,
        causal=layer.plan.causal,
        sliding_window=layer.plan.sliding_window,
        softcap=layer.plan.softcap,
        attention_bias=bias,
        head_sink=None if layer.sink is None else seen[layer.sink],
        key_offset=layer.key.offset,
        value_offset=layer.value.offset,
        element=ELEMENTS[layer.plan.dtype],
    )
    given = output[:, :, skip:].astype(np.float64)
    error = float(np.abs(given - expected).max() / max(np.abs(expected).max(), 1e-30))
    figures = OracleFigures(
        layer.plan.layer,
        backend,
        codes=sum(one.codes for one in found),
        codes_differing=sum(one.differing for one in found),
        codes_wrong=sum(one.wrong for one in found),
        scale_steps=max(one.steps for one in found),
        attention_error=error,
    )
    return figures, caches


def _cache(decoder: Decoder, present: str) -> Array:
    for index, spec in enumerate(decoder.signature.caches):
        if spec.pair.present == present:
            return decoder.cache(index)
    raise KeyError(present)
