"""What the decoder's own operators refuse on CANN: by name and values, before anything is enqueued.

The session lives on after a bad call.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from tests.cann.decoder_models import feeds_of, model_of_operator
from tests.cann.fake_acl import FakeAcl
from tests.cann.session import CannSession, on_cpu
from tests.cann.test_host_creation import ON_CANN, failing_kernels
from tests.native.badcalls import DECODER_CALLS, DECODER_SHAPES, Bad, bad_call_of, each, zeros
from tests.ops.decoder_oracles import decoder_feeds
from tests.singleop import INPUTS
from tq_onnx.ops.domain import (
    DECODER,
    GATHER,
    RMS_NORMALIZATION,
    ROTARY_EMBEDDING,
    SWISH,
    TRANSPOSE,
)
from tq_onnx.runtime.library import get_library_path

pytestmark = [pytest.mark.cann, pytest.mark.usefixtures("kernels_named")]

SHAPES = {**DECODER_SHAPES, SWISH: (2, 32), GATHER: (6, 64)}
CALLS = [
    *(
        case
        for case in DECODER_CALLS
        if "head size 7" not in case.message and all(a.size for a in case.changes.values())
        if "X has shape []" not in case.message
    ),
    bad_call_of(
        ROTARY_EMBEDDING,
        ON_CANN + "X has head size 32, expected 64 or 128",
        X=zeros(2, 3, 4, 32),
        cos_cache=zeros(17, 16),
        sin_cache=zeros(17, 16),
    ),
]


@each(CALLS)
def test_a_bad_call(fake: FakeAcl, tmp_path: Path, case: Bad) -> None:
    op = case.op
    model = model_of_operator(op)
    session = CannSession(model, tmp_path, library=get_library_path())
    good = decoder_feeds(op, SHAPES[op])
    fake.reset()
    with pytest.raises(Exception, match=f"{op}.*{re.escape(case.message)}"):
        session.run({**good, **case.changes})
    counts = fake.counts()
    assert not [name for name in counts if name.startswith("kernel.tq_")]
    assert "copy.device_to_device" not in counts
    (theirs,) = on_cpu(model, good, get_library_path())
    (ours,) = session.run(good)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("op", [op for op in SHAPES if op != SWISH])  # which takes any X
def test_a_bad_call_waits_for_its_inputs(fake: FakeAcl, tmp_path: Path, op: str) -> None:
    """Or the provider destroys a stream that is still at its copies, which ``fake`` forbids."""
    session = CannSession(model_of_operator(op), tmp_path, library=get_library_path())
    fake.set_delay(20_000)
    first = INPUTS[op][0]
    bad = {first: np.ones((1, *SHAPES[op]), np.float32)}
    if op == RMS_NORMALIZATION:
        bad = {"scale": np.ones(32, np.float32)}
    with pytest.raises(Exception, match=op):
        session.run({**feeds_of(op, "float32", SHAPES[op]), **bad})


def test_an_address_that_is_not_aligned(fake: FakeAcl, tmp_path: Path) -> None:
    """Without the Neg before it, since that would make an aligned copy."""
    feeds = feeds_of(ROTARY_EMBEDDING, "float32", (1, 2, 1, 64))
    positions = feeds.pop("position_ids")
    tables = {name: feeds[name] for name in ("cos_cache", "sin_cache")}
    model = model_of_operator(ROTARY_EMBEDDING, around=False, constants=tables)
    session = CannSession(model, tmp_path, library=get_library_path()).session
    whole = ort.OrtValue.ortvalue_from_numpy(zeros(256), "cann", 0)
    binding = session.io_binding()
    binding.bind_input("X", "cann", 0, np.float32, [1, 2, 1, 64], whole.data_ptr() + 4)
    binding.bind_cpu_input("position_ids", positions)
    binding.bind_output(f"{ROTARY_EMBEDDING}_output", "cann", 0)
    message = re.escape(f"{ROTARY_EMBEDDING} {ON_CANN}X begins 4 bytes behind a multiple of 32, ")
    with pytest.raises(Exception, match=message + "expected an address that"):
        session.run_with_iobinding(binding)


CREATIONS: list[tuple[str, dict[str, Any], str]] = [
    (
        RMS_NORMALIZATION,
        {"attributes": {"epsilon": -0.5}},
        "epsilon is -0.500000, expected a",
    ),
    (TRANSPOSE, {"attributes": {"perm": [1, 0]}}, "perm is [1, 0], expected [0, 2, 1, 3]"),
    (TRANSPOSE, {"attributes": {}}, "attribute perm is missing"),
    *(
        (op, {"dtype": "bfloat16"}, f"{ON_CANN}the model has type bfloat16, expected float or")
        for op in DECODER
    ),
]


@pytest.mark.parametrize(("op", "options", "message"), CREATIONS)
def test_a_model_that_is_refused(
    fake: FakeAcl, tmp_path: Path, op: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(Exception, match=f"{op}.*{re.escape(message)}"):
        CannSession(model_of_operator(op, **options), tmp_path, library=get_library_path())


@pytest.mark.parametrize("missing", ["tq_rotary_embedding_float16", "tq_encode_float32"])
def test_a_library_without_a_function(
    fake: FakeAcl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    library = failing_kernels(tmp_path, 9, missing)
    monkeypatch.setenv("TQ_ONNX_CANN_KERNELS", str(library))
    message = f"{GATHER}: {library} has no function tq_launch_{missing}"
    with pytest.raises(Exception, match=re.escape(message)):
        CannSession(model_of_operator(GATHER), tmp_path, library=get_library_path())


def test_a_launch_that_fails(
    fake: FakeAcl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = ROTARY_EMBEDDING
    monkeypatch.setenv("TQ_ONNX_CANN_KERNELS", str(failing_kernels(tmp_path, 9)))
    session = CannSession(model_of_operator(op), tmp_path, library=get_library_path())
    with pytest.raises(Exception, match=f"{op}: its kernel was not enqueued, ACL error 9"):
        session.run(feeds_of(op, "float32", SHAPES[op]))
