"""The operators on the device against numpy: bytes that encode writes, errors of attention.

Encoding must be what the reference makes of the same vectors, but for ties
(``tq_onnx.codec.acceptance``): the device sums in another order. Without a search and offsets,
vectors are drawn so that none is near a tie, hence every byte is expected to be equal. Attention is
compared with attention in float64 over the caches as the reference decodes them, which leaves
nothing of quantisation in the error.

The sizes of calls are checked with the plainest coding, and all codings with a few sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tq_onnx.ascend.features import CODECS, HEAD_SIZES, IN_PLANES, least_row_bytes
from tq_onnx.ascend.verification import environment
from tq_onnx.ascend.verification.calls import bind, seconds_of_a_call
from tq_onnx.ascend.verification.findings import DeviceCheck, Effort, Figures, Findings
from tq_onnx.ascend.verification.singlenodes import (
    HEADS,
    PLAIN,
    Coding,
    Tables,
    attention_model,
    encode_model,
)
from tq_onnx.codec import reference
from tq_onnx.codec.acceptance import FIELD_STEPS, is_clear, judge_rows
from tq_onnx.codec.kind import Tables as RowTables
from tq_onnx.codec.planes import planes_of_rows, rows_of_planes
from tq_onnx.codec.quantise import tables_of
from tq_onnx.codec.spec import row_layout
from tq_onnx.runtime.io_binding import BoundModel

Array = npt.NDArray[Any]

DTYPES: Final = ("float32", "float16")
ATTENTION_ERROR: Final = 1e-4
"""Absolute, for values of the size of random unit vectors; half precision rounds the result too."""
CANN_ERROR: Final = 5e-3
"""The same of CANN's attention, which multiplies halves or digits."""

_HALF_ROUNDING: Final = 2.0**-10
_MOST_ROWS: Final = 2048


@dataclass(frozen=True)
class Case:
    """Sizes of one call.

    Attributes:
        head_size: D.
        new: T.
        past: tokens in the caches, of each sequence.
        group: query heads of each KV head.
        spare: slots after the new tokens.
        coding: how rows are made.
    """

    head_size: int
    new: int
    past: tuple[int, ...]
    group: int = 1
    spare: int = 3
    coding: Coding = PLAIN

    @property
    def batch(self) -> int:
        """B."""
        return len(self.past)

    @property
    def slots(self) -> int:
        """S."""
        return max(self.past) + self.new + self.spare

    def __str__(self) -> str:
        """Return the sizes for names of checks."""
        past = ",".join(map(str, self.past))
        group = f" group={self.group}" if self.group > 1 else ""
        return f"D={self.head_size} B={self.batch} T={self.new} past={past}{group}{self.coding}"


CODINGS: Final = (
    *(Coding(codec, searches=True) for codec in CODECS),
    *(Coding(codec, searches=True, planes=True) for codec in IN_PLANES),
    Coding(searches=True, offset_rows=8),
)
"""Beside the plainest: every codec as the presets have it, in planes too, and offsets."""

Bind = Callable[[Case, str, int], tuple[BoundModel, dict[str, Array], Tables]]
"""Makes so many calls ready: what runs them, the inputs of one and its tables."""


def encode_cases() -> Iterator[Case]:
    """Yield steps and prompts of one sequence and of sequences of different lengths."""
    for size in HEAD_SIZES:
        for new, past in ((1, (0,)), (1, (37,)), (17, (0,)), (300, (5,)), (9, (5, 3)), (1, (8, 2))):
            yield Case(size, new, past)
        for coding in CODINGS:
            yield Case(size, 17, (5,), coding=coding)


def attention_cases(most: int) -> Iterator[Case]:
    """Yield steps and prompts with groups of heads; a query has at most ``most`` elements."""
    for size in HEAD_SIZES:
        for group, new, past in (
            (1, 1, (0,)),
            (2, 1, (63,)),
            (4, 1, (300,)),
            (8, 1, (1000,)),
            (2, 17, (0,)),
            (1, 64, (10,)),
            (5, 3, (70, 4)),
        ):
            case = Case(size, new, past, group)
            if case.batch * HEADS * group * new * size <= most:
                yield case
        for coding in CODINGS:
            yield Case(size, 1, (700,), 2, coding=coding)  # long enough for keys in parts
        for codec in IN_PLANES:
            for new in (1, 17):
                yield Case(size, new, (70,), 2, coding=Coding(codec, planes=True, suits_cann=True))


def check_encode(findings: Findings, dtypes: Sequence[str] = DTYPES) -> None:
    """Check the bytes that encode writes, and time it."""
    for dtype in dtypes:
        for case in encode_cases():
            name = f"encode {dtype} {case}"
            if _left_out(findings, name, case):
                continue
            findings.check(
                name,
                partial(_encoded, case, dtype),
                "no code that is not a tie differs, fields by at most one step, no other byte",
            )
    for name, dtype, case in timed_encodes(dtypes):
        findings.time(name, partial(_time, _encode_bound, case, dtype, findings.effort))


def timed_encodes(dtypes: Sequence[str] = DTYPES) -> Iterator[tuple[str, str, Case]]:
    """Yield the name, the element type and the sizes of each call of encode that is timed."""
    default = Coding(searches=True)
    for dtype in dtypes:
        for case in (Case(128, 1, (1000,), coding=default), Case(128, 512, (0,), coding=default)):
            yield f"encode {dtype} {case}", dtype, case


def check_attention(findings: Findings, dtypes: Sequence[str] = DTYPES) -> None:
    """Check the errors of attention, and time it."""
    for dtype in dtypes:
        for case in attention_cases(findings.effort.most):
            name = f"attention {dtype} {case}"
            if _left_out(findings, name, case):
                continue
            findings.check(
                name,
                partial(_attended, case, dtype),
                f"an error of at most {_error_of(case)} against float64"
                + (", and half a step of float16" if dtype == "float16" else ""),
            )
    for name, dtype, case in timed_attentions(findings.effort.keys, dtypes):
        findings.time(name, partial(_time, _attention_bound, case, dtype, findings.effort))


def timed_attentions(keys: int, dtypes: Sequence[str] = DTYPES) -> Iterator[tuple[str, str, Case]]:
    """Yield the same of attention: of four sequences, over so many tokens and eight times as many.

    A launch for four sequences of two KV heads is as one for eight heads. Groups are those of
    models with 16 and with 40 query heads.
    """
    for dtype in dtypes:
        for past in (keys, 8 * keys):
            for group in (2, 5):
                case = Case(128, 1, (past - 1,) * 4, group=group)
                yield f"attention {dtype} {case}", dtype, case


def _left_out(findings: Findings, name: str, case: Case) -> bool:
    """Note a check of rows that this device does not move; tell whether it is one."""
    row, soc = row_layout(case.coding.codec, case.head_size).row_bytes, environment.soc()
    least = least_row_bytes(soc or "")
    if row >= least:
        return False
    problem = f"not done: rows have {row} bytes, and an {soc} moves {least} or more"
    findings.checks.append(DeviceCheck(name, None, problem=problem))
    return True


def _time(bound: Bind, case: Case, dtype: str, effort: Effort) -> list[float]:
    return seconds_of_a_call(lambda calls: bound(case, dtype, calls)[0], effort)


def _encode_bound(
    case: Case, dtype: str, calls: int = 1
) -> tuple[BoundModel, dict[str, Array], Tables]:
    tables = Tables(case.head_size, case.coding)
    rng = np.random.default_rng(case.new)
    width = row_layout(tables.codec, case.head_size).row_bytes
    # The bytes in other slots must be the same afterwards.
    past = rng.integers(0, 256, (case.batch, HEADS, case.slots, width)).astype(np.uint8)
    inputs = {
        "vectors": _vectors(rng, case, dtype, tables),
        "past": planes_of_rows(past, tables.field_bytes),
        "past_length": np.array(case.past, np.int64),
    }
    bound = bind(
        encode_model(tables, dtype),
        inputs,
        f"encode {case}",
        on_host=("past_length",),
        in_place={"present": "past"},
        calls=calls,
    )
    return bound, inputs, tables


def _encoded(case: Case, dtype: str) -> tuple[bool, Figures]:
    bound, inputs, tables = _encode_bound(case, dtype)
    present = rows_of_planes(bound.run()["present"], tables.field_bytes)
    past = rows_of_planes(inputs["past"], tables.field_bytes)
    vectors, lengths, offset = inputs["vectors"], inputs["past_length"], tables.offsets[0]
    original = None
    if offset is not None:
        original, offsets = vectors, reference.offset_rows(offset, lengths, case.batch, case.new)
        vectors = vectors.astype(np.float32) - offsets.astype(np.float32)
    rows = reference.encode(
        vectors,
        tables.codec,
        tables.rotations[0],
        tables.codebook,
        tables.norm_correction,
        gains=tables.gains,
    )
    expected = reference.append(past, rows, lengths)
    new = np.stack([present[b, :, length : length + case.new] for b, length in enumerate(lengths)])
    judged = judge_rows(
        new, vectors, tables.codec, _row_tables(tables), given=original, element=dtype
    )
    differing = int((present != expected).sum())
    outside = differing - int((new != rows).sum())
    figures = {
        "bytes": int(rows.size),
        "bytes_differing": differing - outside,
        "other_bytes_changed": outside,
        "codes_wrong": judged.wrong,
        "scale_steps": judged.steps,
    }
    return judged.wrong == 0 and judged.steps <= FIELD_STEPS and outside == 0, figures


def _attention_bound(
    case: Case, dtype: str, calls: int = 1
) -> tuple[BoundModel, dict[str, Array], Tables]:
    tables = Tables(case.head_size, case.coding)
    rng = np.random.default_rng(case.new)
    drawn = min(case.slots, _MOST_ROWS)  # more are the same once more: they are only timed
    shape = (case.batch, HEADS, drawn, case.head_size)
    caches = [
        np.take(
            reference.encode(rng.standard_normal(shape), tables.codec, rotation, tables.codebook),
            np.arange(case.slots) % drawn,
            axis=2,
        )
        for rotation in tables.rotations
    ]
    heads = (case.batch, HEADS * case.group, case.new, case.head_size)
    inputs = {
        "query": rng.standard_normal(heads).astype(dtype),
        "key_cache": planes_of_rows(caches[0], tables.field_bytes),
        "value_cache": planes_of_rows(caches[1], tables.field_bytes),
        "past_length": np.array(case.past, np.int64),
    }
    bound = bind(
        attention_model(tables, dtype, case.head_size**-0.5),
        inputs,
        f"attention {case}",
        on_host=("past_length",),
        calls=calls,
    )
    return bound, inputs, tables


def _error_of(case: Case) -> float:
    return CANN_ERROR if case.coding.suits_cann else ATTENTION_ERROR


def _attended(case: Case, dtype: str) -> tuple[bool, Figures]:
    bound, inputs, tables = _attention_bound(case, dtype)
    output = bound.run()["output"].astype(np.float64)
    centroids = tables.codebook.centroids
    expected = reference.attention(
        inputs["query"],
        rows_of_planes(inputs["key_cache"], tables.field_bytes),
        rows_of_planes(inputs["value_cache"], tables.field_bytes),
        inputs["past_length"],
        key=tables.codec,
        value=tables.codec,
        key_rotation=tables.rotations[0],
        key_codebook=centroids,
        value_rotation=tables.rotations[1],
        value_codebook=centroids,
        scale=case.head_size**-0.5,
        causal=True,
        softcap=tables.softcap,
        key_offset=tables.offsets[0],
        value_offset=tables.offsets[1],
    )
    largest = float(np.abs(expected).max())
    error = float(np.abs(output - expected).max())  # NaN fails the comparison below
    limit = _error_of(case) + (_HALF_ROUNDING * largest if dtype == "float16" else 0.0)
    figures = {"error": number(error), "largest": largest, "limit": limit}
    return bool(error <= limit), figures


def _vectors(rng: np.random.Generator, case: Case, dtype: str, tables: Tables) -> Array:
    """Draw random vectors; of the plainest coding such that no coordinate is near a boundary."""
    shape = (case.batch, HEADS, case.new, case.head_size)
    vectors = rng.standard_normal(shape).astype(dtype)
    if case.coding != PLAIN:
        return vectors
    row_tables = _row_tables(tables)
    while (near := ~is_clear(vectors, tables.codec, row_tables)).any():
        vectors[near] = rng.standard_normal((int(near.sum()), case.head_size)).astype(dtype)
    return vectors


def _row_tables(tables: Tables) -> RowTables:
    """Return the tables of the rows that ``encode_model`` makes."""
    return tables_of(
        tables.codec,
        tables.rotations[0],
        tables.codebook,
        tables.norm_correction,
        gains=tables.gains,
    )


def number(value: float) -> float | str:
    """Return a number that JSON has, or else its name."""
    return value if np.isfinite(value) else str(value)
