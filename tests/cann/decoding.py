"""Sessions of both operators on CANNExecutionProvider, beside the same library's CPU operators.

Caches are compared to the byte, attention to 1e-4.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort

from tests.cann.operators import Sizes
from tests.cann.session import Array, CannSession, on_cpu
from tq_onnx.codec import reference
from tq_onnx.codec.planes import rows_of_planes
from tq_onnx.codec.spec import row_layout
from tq_onnx.runtime.library import get_library_path

CACHES = ("key", "value")
IN_PLANES = {"encode": {"planes": 1}, "attention": {"planes": 1, "softcap": 50.0}}
"""Attributes of nodes over planes that CANN's own attention does not take."""
SCALE_ROUNDING = 8 * 2.0**-23
"""Of float32, relative."""


def assert_agree(ours: Array, theirs: Array) -> None:
    """Outputs of the attention; those of float16 within a unit in the last place besides."""
    assert ours.dtype == theirs.dtype
    assert np.isfinite(theirs).all()
    relative = 2.0**-10 if ours.dtype == np.float16 else 0.0
    np.testing.assert_allclose(
        ours.astype(np.float32), theirs.astype(np.float32), rtol=relative, atol=1e-4
    )


def assert_same_cache(ours: Array, theirs: Array, sizes: Sizes, overlay: int = 0) -> None:
    """To the byte, but for scales of float32: sums of squares depend on their order."""
    layout = row_layout(sizes.codec, sizes.head_size)
    ours, theirs = (rows_of_planes(cache, sizes.field_bytes, overlay) for cache in (ours, theirs))
    if layout.fields[0].size == np.dtype(np.float32).itemsize:
        scales = [reference.fields_of(cache, layout)["scale"] for cache in (ours, theirs)]
        np.testing.assert_allclose(*scales, rtol=SCALE_ROUNDING, atol=0)
        ours, theirs = ours[..., : layout.code_bytes], theirs[..., : layout.code_bytes]
    np.testing.assert_array_equal(ours, theirs)


class Decoding:
    """A session whose caches stay on the device, in place, beside the CPU provider's."""

    def __init__(self, model: bytes, sizes: Sizes, slots: int, folder: Path) -> None:
        self.model, self.sizes = model, sizes
        self.cann = CannSession(model, folder, library=get_library_path())
        self.theirs = {f"past_{kind}": sizes.empty_cache(slots) for kind in CACHES}
        self.caches = {
            kind: ort.OrtValue.ortvalue_from_numpy(sizes.empty_cache(slots), "cann", 0)
            for kind in CACHES
        }

    def step(self, vectors: dict[str, Array], past_length: Array) -> None:
        """Runs both on new tokens and compares what they leave."""
        feeds = {**vectors, "past_length": past_length}
        binding = self.cann.session.io_binding()
        for name, array in feeds.items():
            binding.bind_cpu_input(name, array)
        binding.bind_output("output")
        for kind, cache in self.caches.items():
            binding.bind_ortvalue_input(f"past_{kind}", cache)
            binding.bind_ortvalue_output(f"present_{kind}", cache)
        self.cann.session.run_with_iobinding(binding)
        output, *caches = on_cpu(self.model, {**feeds, **self.theirs}, get_library_path())
        self.theirs = dict(zip(self.theirs, caches, strict=True))
        for kind, expected in zip(CACHES, caches, strict=True):
            assert_same_cache(self.caches[kind].numpy(), expected, self.sizes)
        assert_agree(binding.get_outputs()[0].numpy(), output)
