"""Bad calls of the operators on CANN: errors with the name of the operator and the values.

Nothing is enqueued then, and the session lives on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cann.fake_acl import FakeAcl
from tests.cann.operators import Sizes, decoder_attention
from tests.cann.session import Array, CannSession, on_cpu
from tq_onnx.ops.domain import ATTENTION, ENCODE
from tq_onnx.runtime.library import get_library_path

pytestmark = [pytest.mark.cann, pytest.mark.usefixtures("exact_products")]

KERNELS = "TQ_ONNX_CANN_KERNELS"
U8 = np.uint8
SIZES = Sizes(head_size=64, group=2, heads=2, batch=2)


def zeros(*shape: int, dtype: Any = np.float32) -> Array:
    return np.zeros(shape, dtype)


def feeds(**changes: Array) -> dict[str, Array]:
    return {
        **SIZES.vectors(3, "float32"),
        "past_key": SIZES.empty_cache(8),
        "past_value": SIZES.empty_cache(8),
        "past_length": np.array([4]),
        **changes,
    }


def lengths(*values: int) -> Array:
    return np.array(values, np.int64)


ON_CANN = "on CANNExecutionProvider: "
CALLS: dict[str, tuple[Mapping[str, Array], str, str]] = {
    "rank": ({"key": zeros(2, 3, 64)}, ENCODE, "vectors has shape [2, 3, 64], expected 4"),
    "head size": (
        {"key": zeros(2, 2, 3, 72), "past_key": zeros(2, 2, 8, 38, dtype=U8)},
        ENCODE,
        "rotation has shape [64, 64], expected [72, 72]",
    ),
    "rows that are narrower": (
        {"past_key": zeros(2, 2, 8, 33, dtype=U8)},
        ENCODE,
        "past has row width 33, but lloyd_max 4 rows of head size 64 have 34 bytes",
    ),
    "rows that are wider": (
        {"past_key": zeros(2, 2, 8, 40, dtype=U8)},
        ENCODE,
        ON_CANN + "past has row width 40, expected the 34 bytes of lloyd_max 4 rows of head size",
    ),
    "batch": ({"past_value": zeros(3, 2, 8, 34, dtype=U8)}, ENCODE, "[3, 2, 8, 34], expected [2,"),
    "heads": ({"past_value": zeros(2, 1, 8, 34, dtype=U8)}, ENCODE, "[2, 1, 8, 34], expected [2,"),
    "a scalar length": (
        {"past_length": np.array(4)},
        ENCODE,
        "past_length has shape [], expected 1 dimension",
    ),
    "number of lengths": (
        {"past_length": lengths(1, 2, 3)},
        ENCODE,
        "past_length has 3 elements, expected 1 or 2",
    ),
    "negative length": (
        {"past_length": lengths(1, -1)},
        ENCODE,
        "past_length[1] is -1, expected 0 or more",
    ),
    "length beyond the past": (
        {"past_length": lengths(9)},
        ENCODE,
        "past_length[0] is 9, but past has only 8 slots",
    ),
    "highest length": (
        {"past_length": lengths(np.iinfo(np.int64).max)},
        ENCODE,
        "past_length[0] is 9223372036854775807, but past has only 8 slots",
    ),
    "query heads": (
        {"query": zeros(2, 3, 3, 64)},
        ATTENTION,
        "query has 3 heads, expected a multiple of the 2 heads of key_cache",
    ),
    "more queries than slots": (
        {"query": zeros(2, 4, 9, 64)},
        ATTENTION,
        "past_length 4 plus 9 new tokens is more than the 8 slots of key_cache",
    ),
    "query of another head size": (
        {"query": zeros(2, 4, 3, 128)},
        ATTENTION,
        "key_cache has row width 34, but lloyd_max 4 rows of head size 128 have 66 bytes",
    ),
    "caches of other lengths": (
        {"past_value": zeros(2, 2, 9, 34, dtype=U8)},
        ATTENTION,
        "value_cache has shape [2, 2, 9, 34], expected [2, 2, 8, 34]",
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_bad_call(fake: FakeAcl, kernels_named: None, tmp_path: Path, case: str) -> None:
    changes, op, message = CALLS[case]
    model = decoder_attention()
    session = CannSession(model, tmp_path, library=get_library_path())
    with pytest.raises(Exception, match=f"{op}.*{re.escape(message)}"):
        session.run(feeds(**changes))
    good = feeds()
    theirs = on_cpu(model, good, get_library_path())
    output, *caches = session.run(good)
    np.testing.assert_allclose(output, theirs[0], rtol=0, atol=1e-4)
    for ours, expected in zip(caches, theirs[1:], strict=True):
        np.testing.assert_array_equal(ours, expected)


def test_a_bad_call_enqueues_no_kernel(fake: FakeAcl, kernels_named: None, tmp_path: Path) -> None:
    session = CannSession(decoder_attention(), tmp_path, library=get_library_path())
    fake.reset()
    with pytest.raises(Exception, match="is 9, but past has only 8 slots"):
        session.run(feeds(past_length=lengths(9)))
    assert not [name for name in fake.counts() if name.startswith("kernel.")]


def test_a_head_size_that_the_kernels_have_not(
    fake: FakeAcl, kernels_named: None, tmp_path: Path
) -> None:
    session = CannSession(decoder_attention(head_size=72), tmp_path, library=get_library_path())
    sizes = Sizes(head_size=72)
    given = {f"past_{kind}": sizes.empty_cache(8) for kind in ("key", "value")}
    given |= {**sizes.vectors(3, "float32"), "past_length": lengths(0)}
    message = f"{ENCODE} {ON_CANN}vectors has head size 72, expected 64 or 128"
    with pytest.raises(Exception, match=re.escape(message)):
        session.run(given)
