"""What the decoder's own operators refuse on CANN: by name and values, before anything is enqueued.

The session lives on after a bad call.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from simulated_kernels import COMPILER, INTERFACE, TILING_OF
from tests.cann.decoder_models import POSITIONS, feeds_of, model_of_operator
from tests.cann.fake_acl import FakeAcl
from tests.cann.session import Array, CannSession, on_cpu
from tests.singleop import INPUTS
from tq_onnx.codec.spec import layout_digest
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

ON_CANN = "on CANNExecutionProvider: "

SHAPES: dict[str, tuple[int, ...]] = {
    RMS_NORMALIZATION: (3, 64),
    ROTARY_EMBEDDING: (2, 3, 4, 64),
    SWISH: (2, 32),
    TRANSPOSE: (2, 3, 4, 64),
    GATHER: (24, 64),
}


def zeros(*shape: int, dtype: Any = np.float32) -> Array:
    return np.zeros(shape, dtype)


def numbers(*values: Any) -> Array:
    return np.array(values, np.int64)


HIGHEST = np.iinfo(np.int64).max
LOWEST = np.iinfo(np.int64).min

CALLS: dict[str, tuple[str, dict[str, Array], str]] = {
    "another scale": (
        RMS_NORMALIZATION,
        {"scale": zeros(32)},
        "scale has shape [32], expected [64] for the last dimension of X",
    ),
    "a scale of another rank": (
        RMS_NORMALIZATION,
        {"scale": zeros(1, 64)},
        "scale has shape [1, 64], expected [64]",
    ),
    "another head size": (
        ROTARY_EMBEDDING,
        {
            "X": zeros(2, 3, 4, 32),
            "cos_cache": zeros(POSITIONS, 16),
            "sin_cache": zeros(POSITIONS, 16),
        },
        ON_CANN + "X has head size 32, expected 64 or 128",
    ),
    "three dimensions": (
        ROTARY_EMBEDDING,
        {"X": zeros(3, 4, 64)},
        "X has shape [3, 4, 64], expected 4 dimensions",
    ),
    "tables of another width": (
        ROTARY_EMBEDDING,
        {"cos_cache": zeros(POSITIONS, 64)},
        f"cos_cache has shape [{POSITIONS}, 64], expected [{POSITIONS}, 32]",
    ),
    "tables of other lengths": (
        ROTARY_EMBEDDING,
        {"sin_cache": zeros(POSITIONS - 1, 32)},
        f"sin_cache has shape [{POSITIONS - 1}, 32], expected [{POSITIONS}, 32]",
    ),
    "other tokens": (
        ROTARY_EMBEDDING,
        {"position_ids": numbers([0, 1, 2])},
        "position_ids has shape [1, 3], expected [1, 4] for the tokens of X",
    ),
    "another batch": (
        ROTARY_EMBEDDING,
        {"position_ids": zeros(3, 4, dtype=np.int64)},
        "position_ids has shape [3, 4], expected [2, 4] for the batch and tokens of X",
    ),
    "positions without a batch": (
        ROTARY_EMBEDDING,
        {"position_ids": numbers(0, 1, 2, 3)},
        "position_ids has shape [4], expected 2 dimensions",
    ),
    "a negative position": (
        ROTARY_EMBEDDING,
        {"position_ids": numbers([0, 1, 2, 3], [0, 1, -1, 0])},
        f"position_ids[1, 2] is -1, expected 0 or more and less than the {POSITIONS} rows of cos",
    ),
    "a position beyond the tables": (
        ROTARY_EMBEDDING,
        {"position_ids": numbers([37, 38, 39, 40])},
        "position_ids[0, 3] is 40, expected 0 or more and less than the 40 rows of cos_cache",
    ),
    "the highest position": (
        ROTARY_EMBEDDING,
        {"position_ids": numbers([0, 1, 2, HIGHEST])},
        f"position_ids[0, 3] is {HIGHEST}, expected",
    ),
    "two dimensions": (
        TRANSPOSE,
        {"X": zeros(3, 64)},
        "X has shape [3, 64], expected 4 dimensions",
    ),
    "no table": (
        GATHER,
        {"data": zeros(2, 3, 4)},
        "data has shape [2, 3, 4], expected 2 dimension",
    ),
    "an index without dimensions": (
        GATHER,
        {"indices": np.array(3)},
        "indices has shape [], expected 2 dimensions",
    ),
    "indices of three dimensions": (
        GATHER,
        {"indices": zeros(1, 1, 1, dtype=np.int64)},
        "indices has shape [1, 1, 1], expected 2 dimensions",
    ),
    "an index beyond the table": (
        GATHER,
        {"indices": numbers([0, 1], [2, 24])},
        "indices[1, 1] is 24, expected -24 or more and less than the 24 rows of data",
    ),
    "an index before the table": (
        GATHER,
        {"indices": numbers(0, -25)},
        "indices[1] is -25, expected -24 or more and less than the 24 rows of data",
    ),
    "the lowest index": (GATHER, {"indices": numbers(LOWEST)}, f"indices[0] is {LOWEST}, expected"),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_bad_call(fake: FakeAcl, tmp_path: Path, case: str) -> None:
    op, changes, message = CALLS[case]
    model = model_of_operator(op)
    session = CannSession(model, tmp_path, library=get_library_path())
    good = feeds_of(op, "float32", SHAPES[op])
    fake.reset()
    with pytest.raises(Exception, match=f"{op}.*{re.escape(message)}"):
        session.run({**good, **changes})
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


CREATIONS: dict[str, tuple[str, dict[str, Any], str]] = {
    "a negative epsilon": (
        RMS_NORMALIZATION,
        {"attributes": {"epsilon": -0.5}},
        "epsilon is -0.500000, expected a finite number that is not negative",
    ),
    "no epsilon": (RMS_NORMALIZATION, {"attributes": {}}, "attribute epsilon is missing"),
    "another perm": (
        TRANSPOSE,
        {"attributes": {"perm": [0, 1, 3, 2]}},
        "perm is [0, 1, 3, 2], expected [0, 2, 1, 3]",
    ),
    "a short perm": (
        TRANSPOSE,
        {"attributes": {"perm": [1, 0]}},
        "perm is [1, 0], expected [0, 2, 1, 3]",
    ),
    "no perm": (TRANSPOSE, {"attributes": {}}, "attribute perm is missing"),
    **{
        f"{op} of bfloat16": (
            op,
            {"dtype": "bfloat16"},
            ON_CANN + "the model has type bfloat16, expected float or float16",
        )
        for op in DECODER
    },
}


@pytest.mark.parametrize("case", CREATIONS)
def test_a_model_that_is_refused(fake: FakeAcl, tmp_path: Path, case: str) -> None:
    op, options, message = CREATIONS[case]
    with pytest.raises(Exception, match=f"{op}.*{re.escape(message)}"):
        CannSession(model_of_operator(op, **options), tmp_path, library=get_library_path())


def kernels_without(folder: Path, *missing: str) -> Path:
    """A kernel library with all functions but these; each says that it failed."""
    source = (
        f'extern "C" const char* tq_kernels_layout_digest() {{ return "{layout_digest()}"; }}\n'
        f'extern "C" unsigned tq_kernels_interface() {{ return {INTERFACE}; }}\n'
    )
    source += "\n".join(
        f'extern "C" unsigned tq_launch_{name}() {{ return 9; }}'
        for name in TILING_OF
        if name not in missing
    )
    library = folder / "libother.so"
    command = [str(COMPILER), "-x", "c++", "-shared", "-fPIC", "-o", str(library), "-"]
    subprocess.run(command, input=source, text=True, check=True)
    return library


@pytest.mark.parametrize("missing", ["tq_rotary_embedding_float16", "tq_encode_float32"])
def test_a_library_without_a_function(
    fake: FakeAcl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    library = kernels_without(tmp_path, missing)
    monkeypatch.setenv("TQ_ONNX_CANN_KERNELS", str(library))
    message = f"{GATHER}: {library} has no function tq_launch_{missing}"
    with pytest.raises(Exception, match=re.escape(message)):
        CannSession(model_of_operator(GATHER), tmp_path, library=get_library_path())


def test_a_launch_that_fails(
    fake: FakeAcl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = ROTARY_EMBEDDING
    monkeypatch.setenv("TQ_ONNX_CANN_KERNELS", str(kernels_without(tmp_path)))
    session = CannSession(model_of_operator(op), tmp_path, library=get_library_path())
    with pytest.raises(Exception, match=f"{op}: its kernel was not enqueued, ACL error 9"):
        session.run(feeds_of(op, "float32", SHAPES[op]))
