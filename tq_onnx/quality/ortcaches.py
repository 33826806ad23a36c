"""A model with ONNX Runtime's own caches in place of TurboQuant's, to compare with.

It is made as the target ``ort-gqa`` makes its models (``tq_onnx.targets.ortgqa.caches``), with
steps for the very text that is scored, without rotation and offsets, and with the model's own
masks. Nothing is written to disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from tq_onnx.codec.channelcodes import ChannelCodes
from tq_onnx.conversion.layers import converted_layers
from tq_onnx.conversion.pipeline import Prepared
from tq_onnx.errors import UnsupportedModelError, located
from tq_onnx.graph.copying import copy_graph
from tq_onnx.runtime.cache import CacheSpec, bytes_per_token
from tq_onnx.runtime.decoder import Decoder
from tq_onnx.runtime.session import make_session
from tq_onnx.runtime.signature import Signature
from tq_onnx.targets.ortgqa.caches import INT4, INT8, STORED, LayerCodes, put_caches

_BITS: Final = {INT8: 8, INT4: 4}

Steps = Sequence[tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]]
"""Per layer the steps of keys and of values, ``[N, D]`` each."""


@dataclass(frozen=True, eq=False)
class OrtCacheModel:
    """A model with ONNX Runtime's caches.

    Attributes:
        model: the serialised model.
        external_data: folder of its external data.
        signature: names and caches.
    """

    model: bytes
    external_data: Path
    signature: Signature

    @property
    def bytes_per_token(self) -> int:
        """Cache bytes of one token of one sequence, all layers."""
        return bytes_per_token(self.signature.caches)

    def decoder(self, *, threads: int | None = None) -> Decoder:
        """Make a growing decoder of batch 1.

        Raises:
            UnsupportedModelError: this onnxruntime has no such cache.
        """
        try:
            session = make_session(
                self.model, library=False, threads=threads, external_data=self.external_data
            )
        except UnsupportedModelError as error:
            raise UnsupportedModelError(
                "this onnxruntime has no GroupQueryAttention with such a cache for this model",
                fix="onnxruntime 1.31 has int8 and int4 in float32 and float16 models",
            ) from error
        return Decoder(session, self.signature, where="the model with ONNX Runtime's caches")


def with_ort_caches(prepared: Prepared, cache: str, steps: Steps = ()) -> OrtCacheModel:
    """Replace the attention of a ``raw`` conversion.

    Args:
        prepared: the conversion; it is not changed.
        cache: ``FLOAT16``, ``INT8`` or ``INT4``.
        steps: for ``INT8`` and ``INT4`` the steps of every layer.

    Raises:
        UnsupportedModelError: the model cannot have such caches.
    """
    model = copy_graph(prepared.loaded.model)
    with located(prepared.loaded.path):
        layers = converted_layers(model, prepared.plan)
    codes: list[LayerCodes | None] = [
        LayerCodes(_plain(_BITS[cache], key), _plain(_BITS[cache], value)) for key, value in steps
    ]
    put_caches(model, layers, cache, codes or [None] * len(layers))
    type_name, packed = STORED[cache]
    specs = tuple(
        CacheSpec(pair, type_name, layer.kv_num_heads, layer.head_size // packed)
        for layer in prepared.plan.layers
        for pair in layer.caches
    )
    signature = Signature(prepared.plan.interface, specs, fixed_capacity=False)
    return OrtCacheModel(
        ir.to_proto(model).SerializeToString(), prepared.loaded.path.parent, signature
    )


def _plain(bits: int, steps: npt.NDArray[np.float32]) -> ChannelCodes:
    return ChannelCodes(bits, np.zeros_like(steps), steps)
