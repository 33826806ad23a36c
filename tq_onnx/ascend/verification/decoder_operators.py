"""A decoder's other operators on the device against numpy: norms, rotary, activation, moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tq_onnx.ascend.verification.calls import bind, seconds_of_a_call
from tq_onnx.ascend.verification.codec_operators import DTYPES, number
from tq_onnx.ascend.verification.findings import Effort, Figures, Findings
from tq_onnx.ops.domain import GATHER, RMS_NORMALIZATION, ROTARY_EMBEDDING, SWISH, TRANSPOSE
from tq_onnx.ops.operators import BY_NAME
from tq_onnx.ops.singleop import single_operator
from tq_onnx.runtime.io_binding import BoundModel

Array = npt.NDArray[Any]
Expected = Callable[[Mapping[str, Array]], Array]

_LIMITS: Final = {"float32": 1e-5, "float16": 2.0**-10}
"""Largest error, in units of the largest number of the result."""

_EPSILON: Final = 1e-6
_POSITIONS: Final = 64


@dataclass(frozen=True)
class Call:
    """One call of an operator.

    Attributes:
        op_type: the operator.
        sizes: sizes in words, for the name of the check.
        inputs: its inputs, in order.
        expected: the result of its inputs in float64.
        attributes: attributes of the node.
        on_host: inputs that the operator reads on the host.
        exact: True if the operator only moves numbers.
    """

    op_type: str
    sizes: str
    inputs: Mapping[str, Array]
    expected: Expected
    attributes: Mapping[str, Any] = field(default_factory=dict)
    on_host: tuple[str, ...] = ()
    exact: bool = False


def calls(dtype: str) -> list[Call]:
    """Return steps and prompts with the sizes of small and of large decoders."""
    rng = np.random.default_rng(0)

    def drawn(*shape: int) -> Array:
        return np.asarray(rng.standard_normal(shape).astype(dtype))

    cases = []
    for shape in ((1, 1, 192), (2, 7, 4, 128), (1, 3, 4096)):
        cases.append(
            Call(
                RMS_NORMALIZATION,
                f"{list(shape)}",
                {"X": drawn(*shape), "scale": drawn(shape[-1])},
                _normalised,
                {"epsilon": _EPSILON},
            )
        )
    angles = rng.uniform(0, 7, (_POSITIONS, 64)).astype(np.float32)
    for head_size, positions in ((128, [[5]]), (128, [[0, 1, 2], [7, 8, 9]]), (64, [[3, 4, 63]])):
        cosines, sines = np.cos(angles[:, : head_size // 2]), np.sin(angles[:, : head_size // 2])
        ids = np.array(positions, np.int64)
        cases.append(
            Call(
                ROTARY_EMBEDDING,
                f"D={head_size} positions={positions}",
                {
                    "X": drawn(len(ids), 4, ids.shape[1], head_size),
                    "cos_cache": cosines,
                    "sin_cache": sines,
                    "position_ids": ids,
                },
                _turned,
                on_host=("position_ids",),
            )
        )
    cases += [
        Call(SWISH, f"{list(shape)}", {"X": 4 * drawn(*shape)}, _activated)
        for shape in ((1, 1, 512), (2, 5, 11008))
    ]
    cases += [
        Call(
            TRANSPOSE,
            f"{list(shape)}",
            {"X": drawn(*shape)},
            lambda inputs: inputs["X"].transpose(0, 2, 1, 3),
            {"perm": [0, 2, 1, 3]},
            exact=True,
        )
        for shape in ((1, 1, 4, 128), (2, 9, 3, 64), (1, 4, 17, 128))
    ]
    cases += [
        Call(
            GATHER,
            f"of 260 rows {ids}",
            {"data": drawn(260, 192), "indices": np.array(ids, np.int64)},
            lambda inputs: inputs["data"][inputs["indices"].astype(np.int64)],
            on_host=("indices",),
            exact=True,
        )
        for ids in ([[7]], [[0, 1, 2, 259], [259, -1, 5, 5]])
    ]
    return cases


def check_decoder(findings: Findings) -> None:
    """Check all operators, and time the calls of a step."""
    for dtype in DTYPES:
        for call in calls(dtype):
            limit = "equal numbers" if call.exact else f"a relative error of {_LIMITS[dtype]:.1g}"
            findings.check(
                f"{call.op_type} {dtype} {call.sizes}", partial(_checked, call, dtype), limit
            )
        timed = [call for call in calls(dtype) if call.sizes.startswith("[1, 1,") or call.on_host]
        for call in (*timed, *moved_pieces(dtype, findings.effort.moved)):
            findings.time(
                f"{call.op_type} {dtype} {call.sizes}",
                partial(_time, call, dtype, findings.effort),
            )


def moved_pieces(dtype: str, moved: int) -> Iterator[Call]:
    """Yield calls that move ``moved`` bytes in and out, in pieces of as many bytes as they name.

    What they take tells the bandwidth of the rows of a cache, of 64 bytes, beside that of larger
    pieces. A launch itself takes what the smallest call of ``Swish`` does.
    """
    item = np.dtype(dtype).itemsize
    for piece in (64, 512, 16384):
        columns = 16
        shape = (1, max(1, moved // piece // columns), columns, piece // item)
        yield Call(
            TRANSPOSE,
            f"{list(shape)} in pieces of {piece} bytes",
            {"X": np.ones(shape, dtype)},
            lambda inputs: inputs["X"].transpose(0, 2, 1, 3),
            {"perm": [0, 2, 1, 3]},
        )


def _time(call: Call, dtype: str, effort: Effort) -> list[float]:
    return seconds_of_a_call(partial(_bound, call, dtype), effort)


def _bound(call: Call, dtype: str, calls: int = 1) -> BoundModel:
    model = single_operator(BY_NAME[call.op_type], call.attributes, dtype)
    return bind(model, call.inputs, call.op_type, on_host=call.on_host, calls=calls)


def _checked(call: Call, dtype: str) -> tuple[bool, Figures]:
    output = _bound(call, dtype).run()["Y"]
    wide = {name: array.astype(np.float64) for name, array in call.inputs.items()}
    expected = call.expected(call.inputs if call.exact else wide)
    if output.shape != expected.shape:
        raise ValueError(f"the result has shape {list(output.shape)}, not {list(expected.shape)}")
    if call.exact:
        differing = int((output != expected).sum())
        return differing == 0, {"numbers": int(output.size), "numbers_differing": differing}
    largest = float(np.abs(expected).max())
    error = float(np.abs(output.astype(np.float64) - expected).max()) / largest
    return error <= _LIMITS[dtype], {"error": number(error), "limit": _LIMITS[dtype]}


def _normalised(inputs: Mapping[str, Array]) -> Array:
    x = inputs["X"]
    mean = (x * x).mean(axis=-1, keepdims=True)
    return np.asarray(x / np.sqrt(mean + _EPSILON) * inputs["scale"])


def _turned(inputs: Mapping[str, Array]) -> Array:
    first, second = np.split(inputs["X"], 2, axis=-1)
    rows = inputs["position_ids"].astype(np.int64)
    cosines, sines = (inputs[name][rows][:, None] for name in ("cos_cache", "sin_cache"))
    return np.concatenate(
        [first * cosines - second * sines, second * cosines + first * sines], axis=-1
    )


def _activated(inputs: Mapping[str, Array]) -> Array:
    return np.asarray(inputs["X"] / (1 + np.exp(-inputs["X"])))
