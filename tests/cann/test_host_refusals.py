"""Bad calls of the operators on CANN: errors with the name of the operator and the values.

Nothing is enqueued then, and the session lives on.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tests.cann.fake_acl import FakeAcl
from tests.cann.operators import Sizes, decoder_attention
from tests.cann.session import Array, CannSession, on_cpu
from tests.native.badcalls import Bad, bad_call_of, each, numbers, rows, zeros
from tq_onnx.ops.domain import ATTENTION, ENCODE
from tq_onnx.runtime.library import get_library_path

pytestmark = [pytest.mark.cann, pytest.mark.usefixtures("exact_products")]

KERNELS = "TQ_ONNX_CANN_KERNELS"
SIZES = Sizes(head_size=64, group=2, heads=2, batch=2)


def feeds(**changes: Array) -> dict[str, Array]:
    return {
        **SIZES.vectors(3, "float32"),
        "past_key": SIZES.empty_cache(8),
        "past_value": SIZES.empty_cache(8),
        "past_length": np.array([4]),
        **changes,
    }


ON_CANN = "on CANNExecutionProvider: "
# The checks are those of tests/native/test_refusals.py, which both providers share: one of each
# function that is called, and what only the kernels of CANN refuse.
CALLS = [
    bad_call_of(ENCODE, "vectors has shape [2, 3, 64], expected 4", key=zeros(2, 3, 64)),
    bad_call_of(
        ENCODE,
        "past has row width 33, but lloyd_max 4 rows of head size 64 have 34 bytes",
        past_key=rows(2, 2, 8, 33),
    ),
    bad_call_of(
        ENCODE,
        ON_CANN + "past has row width 40, expected the 34 bytes of lloyd_max 4 rows of head size",
        past_key=rows(2, 2, 8, 40),
    ),
    bad_call_of(ENCODE, "[2, 1, 8, 34], expected [2,", past_value=rows(2, 1, 8, 34)),
    bad_call_of(
        ENCODE, "past_length has 3 elements, expected 1 or 2", past_length=numbers(1, 2, 3)
    ),
    bad_call_of(ENCODE, "past_length[0] is 9, but past has only 8", past_length=numbers(9)),
    bad_call_of(
        ATTENTION,
        "query has 3 heads, expected a multiple of the 2 heads of key_cache",
        query=zeros(2, 3, 3, 64),
    ),
    bad_call_of(
        ATTENTION,
        "past_length 4 plus 9 new tokens is more than the 8 slots of key_cache",
        query=zeros(2, 4, 9, 64),
    ),
    bad_call_of(
        ATTENTION,
        "key_cache has row width 34, but lloyd_max 4 rows of head size 128 have 66 bytes",
        query=zeros(2, 4, 3, 128),
    ),
    bad_call_of(
        ATTENTION,
        "value_cache has shape [2, 2, 9, 34], expected [2, 2, 8, 34]",
        past_value=rows(2, 2, 9, 34),
    ),
]


@each(CALLS)
def test_a_bad_call(fake: FakeAcl, kernels_named: None, tmp_path: Path, case: Bad) -> None:
    model = decoder_attention()
    session = CannSession(model, tmp_path, library=get_library_path())
    with pytest.raises(Exception, match=f"{case.op}.*{re.escape(case.message)}"):
        session.run(feeds(**case.changes))
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
        session.run(feeds(past_length=numbers(9)))
    assert not [name for name in fake.counts() if name.startswith("kernel.")]


def test_a_head_size_that_the_kernels_have_not(
    fake: FakeAcl, kernels_named: None, tmp_path: Path
) -> None:
    session = CannSession(decoder_attention(head_size=72), tmp_path, library=get_library_path())
    sizes = Sizes(head_size=72)
    given = {f"past_{kind}": sizes.empty_cache(8) for kind in ("key", "value")}
    given |= {**sizes.vectors(3, "float32"), "past_length": numbers(0)}
    message = f"{ENCODE} {ON_CANN}vectors has head size 72, expected 64 or 128"
    with pytest.raises(Exception, match=re.escape(message)):
        session.run(given)
