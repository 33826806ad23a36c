"""The decoder's own operators on CANNExecutionProvider: CANN's, and a simulated kernel.

What is compared with is the CPU operators of the same library in the same wheel. Launches and
copies are counted: one for each run of positions or rows. Tensors without elements do not come
here: the provider's own copies of them fail.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from simulated_kernels import Kernels
from tests.cann.decoder_models import SHAPES, feeds_of, model_of_operator
from tests.cann.fake_acl import FakeAcl
from tests.cann.session import CANN, Array, CannSession, on_cpu
from tests.singleop import INPUTS
from tq_onnx.ops.domain import GATHER, RMS_NORMALIZATION, ROTARY_EMBEDDING, SWISH, TRANSPOSE
from tq_onnx.runtime.library import get_library_path

pytestmark = pytest.mark.cann

ENQUEUED = {
    RMS_NORMALIZATION: {"op.aclnnRmsNorm": 1},
    SWISH: {"op.aclnnSilu": 1},
    TRANSPOSE: {"op.aclnnInplaceCopy": 1},
    GATHER: {"copy.device_to_device": 3},
}
"""What a call is on the device, of operators that have no kernel of ours."""


def assert_agree(ours: Array, theirs: Array) -> None:
    """Within 1e-5; those of float16 within a unit in the last place besides."""
    assert ours.dtype == theirs.dtype
    assert np.isfinite(theirs).all()
    relative = 2.0**-10 if ours.dtype == np.float16 else 1e-5
    np.testing.assert_allclose(
        ours.astype(np.float32), theirs.astype(np.float32), rtol=relative, atol=1e-5
    )


def run_both(
    model: bytes, feeds: dict[str, Array], folder: Path, fake: FakeAcl
) -> tuple[dict[str, int], Array]:
    """What was counted in a run, and its output; both providers' are compared."""
    library = get_library_path()
    session = CannSession(model, folder, library=library)
    fake.reset()
    (ours,) = session.run(feeds)
    counts = fake.counts()
    (theirs,) = on_cpu(model, feeds, library)
    assert_agree(ours, theirs)
    assert {node.provider for node in session.end()} == {CANN}
    return counts, ours


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("case", SHAPES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_agrees_with_the_cpu(
    fake: FakeAcl, simulated: Kernels, tmp_path: Path, case: tuple[str, tuple[int, ...]], dtype: str
) -> None:
    op, shape = case
    fake.set_delay(500)
    feeds = feeds_of(op, dtype, shape)
    counts, _ = run_both(model_of_operator(op, dtype), feeds, tmp_path, fake)
    own = {
        name: count
        for name, count in counts.items()
        if name.startswith(("kernel.tq_", "op.aclnn", "copy.device_to_device"))
    }
    assert own == ENQUEUED.get(op, {f"kernel.tq_rotary_embedding_{dtype}": 1})
    assert simulated.hazards == 0, simulated.messages()


POSITIONS: dict[str, tuple[list[list[int]], int]] = {
    "one row for all": ([[5, 6, 7, 8]], 1),
    "the same for all": ([[5, 6, 7, 8]] * 3, 1),
    "others for each": ([[0, 1, 2, 3], [5, 6, 7, 8], [36, 37, 38, 39]], 3),
    "padding before": ([[1, 1, 0, 1]] * 3, 3),
    "padding of one": ([[0, 1, 2, 3], [1, 1, 0, 1], [0, 1, 2, 3]], 5),
    "backwards": ([[3, 2, 1, 0]], 4),
    "all the same": ([[39, 39, 39, 39]], 4),
}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("case", POSITIONS)
def test_a_launch_for_each_run_of_positions(
    fake: FakeAcl, simulated: Kernels, tmp_path: Path, case: str, dtype: str
) -> None:
    positions, launches = POSITIONS[case]
    feeds = feeds_of(
        ROTARY_EMBEDDING, dtype, (3, 2, 4, 64), position_ids=np.array(positions, np.int64)
    )
    counts, _ = run_both(model_of_operator(ROTARY_EMBEDDING, dtype), feeds, tmp_path, fake)
    assert counts[f"kernel.tq_rotary_embedding_{dtype}"] == launches
    assert simulated.hazards == 0, simulated.messages()


INDICES: dict[str, tuple[Array, int]] = {
    "one": (np.array([3]), 1),
    "a run": (np.array([3, 4, 5, 6]), 1),
    "two sequences of a run": (np.array([[3, 4], [5, 6]]), 1),
    "the same": (np.array([[3, 3, 3]]), 3),
    "from the end": (np.array([[-24, -23, -1]]), 2),
    "over the end": (np.array([-2, -1, 0, 1]), 2),
    "the last and its other name": (np.array([23, -1]), 2),
}


@pytest.mark.parametrize("case", INDICES)
def test_a_copy_for_each_run_of_rows(
    fake: FakeAcl, simulated: Kernels, tmp_path: Path, case: str
) -> None:
    indices, copies = INDICES[case]
    feeds = feeds_of(GATHER, "float16", (24, 33), indices=indices)
    counts, output = run_both(model_of_operator(GATHER, "float16"), feeds, tmp_path, fake)
    assert counts["copy.device_to_device"] == copies
    np.testing.assert_array_equal(output, feeds["data"][indices])


@pytest.mark.parametrize("shape", [(2, 1, 5, 33), (2, 5, 1, 33), (1, 1, 1, 1)])
def test_a_transpose_that_moves_nothing_is_a_copy(
    fake: FakeAcl, simulated: Kernels, tmp_path: Path, shape: tuple[int, ...]
) -> None:
    """Of vectors of any size."""
    feeds = feeds_of(TRANSPOSE, "float32", shape)
    counts, output = run_both(model_of_operator(TRANSPOSE), feeds, tmp_path, fake)
    assert counts["copy.device_to_device"] == 1
    assert not [name for name in counts if name.startswith("kernel.tq_")]
    np.testing.assert_array_equal(output, feeds["X"].transpose(0, 2, 1, 3))


@pytest.mark.parametrize("op", [ROTARY_EMBEDDING, GATHER])
def test_numbers_stay_on_the_host(
    fake: FakeAcl, simulated: Kernels, tmp_path: Path, op: str
) -> None:
    """With tables in the model and the input on the device a call copies nothing but the output."""
    feeds = feeds_of(op, "float32", (1, 2, 3, 64) if op == ROTARY_EMBEDDING else (24, 64))
    numbers = INPUTS[op][-1]
    tables = {name: feeds[name] for name in INPUTS[op][1:-1]}
    model = model_of_operator(op, constants=tables)
    session = CannSession(model, tmp_path, library=get_library_path()).session
    binding = session.io_binding()
    binding.bind_cpu_input(numbers, feeds[numbers])
    first = INPUTS[op][0]
    binding.bind_ortvalue_input(first, ort.OrtValue.ortvalue_from_numpy(feeds[first], "cann", 0))
    binding.bind_output("after_output")
    fake.reset()
    session.run_with_iobinding(binding)
    copies = fake.copies()
    copies.pop("device_to_device", None)
    assert copies == {"device_to_host": 1}
