"""CANN's own attention over INT4 keys and values: does a card take it, is it right, how fast is it?

The call is ``aclnnFusedInferAttentionScoreV2`` with a float32 scale for each token and head (mode
3 of antiquant), one query token, layout BNSD. CANN's documents do not settle whether a 910B takes
that. Its answer is an error of the first phase, which plans and launches nothing. The operators'
library has no part in it, so that the answer is CANN's alone.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from tq_onnx.ascend.verification.anonymise import anonymise
from tq_onnx.ascend.verification.codec_operators import CANN_ERROR
from tq_onnx.ascend.verification.environment import RUNTIME, soc
from tq_onnx.ascend.verification.findings import DeviceCheck, Figures, Findings

Array = npt.NDArray[Any]
Run = Callable[[], None]
Result = TypeVar("Result")

LIBRARY: Final = "libopapi.so"
OPERATOR: Final = "aclnnFusedInferAttentionScoreV2"
NAME: Final = "CANN's attention over INT4"
QUERY_HEADS: Final = (16, 40)

_KV_HEADS: Final = 8
_HEAD_SIZE: Final = 128
_FLOAT, _FLOAT16, _INT4 = 0, 1, 29  # aclDataType
_FORMAT_ND: Final = 2
_TO_DEVICE, _TO_HOST = 1, 2  # aclrtMemcpyKind
_PER_TOKEN_AND_HEAD: Final = 3  # antiquant mode
_NO_BOUND: Final = 2**31 - 1
_NULL: Final = ctypes.c_void_p(None)


def name_of(query_heads: int, keys: int) -> str:
    """Return the name of a check, and of its times."""
    return f"{NAME}, {query_heads}/{_KV_HEADS} heads, {keys} tokens"


def check_cann_attention(findings: Findings) -> None:
    """Check the answer and the numbers of CANN's attention, and time it."""
    if (soc() or "").startswith("Ascend310P"):
        findings.checks.append(DeviceCheck(NAME, None, problem="not done: it is not for a 310P"))
        return
    try:
        library = ctypes.CDLL(LIBRARY)
        getattr(library, OPERATOR)
    except (OSError, AttributeError):
        findings.checks.append(DeviceCheck(NAME, None, problem=f"not done: no {OPERATOR} here"))
        return
    for heads in QUERY_HEADS:
        for keys in (findings.effort.keys, 8 * findings.effort.keys):
            call, name = _Call(library, heads, keys), name_of(heads, keys)
            try:
                holds, figures = call.compared()
            except _RefusedError as refusal:
                # The operators do without it then, so that nothing has failed.
                problem = anonymise(str(refusal))
                findings.checks.append(DeviceCheck(name, None, problem=problem))
                continue
            expected = f"taken, with an error of at most {CANN_ERROR} against float64"
            findings.checks.append(DeviceCheck(name, holds, figures, expected))
            findings.time(name, partial(call.seconds, findings.effort.runs))


class _RefusedError(Exception):
    """CANN does not take the call."""


class _Call:
    """One decode step of a sequence, with everything on the device.

    Args:
        library: CANN's operators.
        query_heads: of the query.
        keys: tokens in the cache, which has no more.
    """

    def __init__(self, library: ctypes.CDLL, query_heads: int, keys: int) -> None:
        self._library, self._runtime = library, ctypes.CDLL(RUNTIME)
        for function in ("aclCreateTensor", "aclCreateTensorList", "aclCreateIntArray"):
            getattr(library, function).restype = ctypes.c_void_p
        self._runtime.aclGetRecentErrMsg.restype = ctypes.c_char_p
        self._query_heads, self._keys = query_heads, keys
        rng = np.random.default_rng(keys)
        self._query = rng.standard_normal((query_heads, _HEAD_SIZE)).astype(np.float16)
        shape = (2, _KV_HEADS, keys)  # of keys and of values
        self._codes = rng.integers(-8, 8, (*shape, _HEAD_SIZE), np.int8)
        self._scales = rng.uniform(0.2, 0.3, shape).astype(np.float32)

    def compared(self) -> tuple[bool, Figures]:
        """Return whether the call is right, and its error."""
        return self._on_device(self._compare)

    def seconds(self, runs: int) -> list[float]:
        """Return the time of a call, in each of a few rows of as many calls."""
        return self._on_device(lambda run, _: [_seconds(self, run, runs) for _ in range(3)])

    def _compare(self, run: Run, output: ctypes.c_void_p) -> tuple[bool, Figures]:
        run()
        self.wait()
        attended = np.empty_like(self._query)
        size = ctypes.c_size_t(attended.nbytes)
        self._expect(
            "aclrtMemcpy", attended.ctypes.data_as(ctypes.c_void_p), size, output, size, _TO_HOST
        )
        keys, values = self._codes * self._scales[..., None].astype(np.float64)
        queries = self._query.reshape(_KV_HEADS, -1, _HEAD_SIZE).astype(np.float64)
        scores = queries @ keys.swapaxes(1, 2) * _HEAD_SIZE**-0.5
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        expected = (weights / weights.sum(axis=-1, keepdims=True) @ values).reshape(attended.shape)
        error = float(np.abs(attended - expected).max())
        return error <= CANN_ERROR, {"error": error if np.isfinite(error) else str(error)}

    def wait(self) -> None:
        """Wait for the stream."""
        self._expect("aclrtSynchronizeStream", self._stream)

    def _expect(self, function: str, *arguments: Any) -> None:
        status = getattr(self._runtime, function)(*arguments)
        if status != 0:
            raise RuntimeError(f"{function}: error {status}")

    def _on_device(self, work: Callable[[Run, ctypes.c_void_p], Result]) -> Result:
        """Return what ``work`` does with the call and its output; frees what it took."""
        self._memory: list[ctypes.c_void_p] = []
        self._stream = ctypes.c_void_p()
        self._expect("aclrtSetDevice", 0)
        self._expect("aclrtCreateStream", ctypes.byref(self._stream))
        try:
            packed = (self._codes[..., 0::2] & 15) | (self._codes[..., 1::2] & 15) << 4
            planes = [
                (self._copied(codes), self._copied(scales))
                for codes, scales in zip(packed, self._scales, strict=True)
            ]
            query, output = self._copied(self._query), self._copied(np.zeros_like(self._query))
            return work(lambda: self._run(query, planes, output), output)
        finally:
            self._runtime.aclrtDestroyStream(self._stream)
            for memory in self._memory:
                self._runtime.aclrtFree(memory)

    def _taken(self, size: int) -> ctypes.c_void_p:
        memory = ctypes.c_void_p()
        self._expect("aclrtMalloc", ctypes.byref(memory), ctypes.c_size_t(size), 0)
        self._memory.append(memory)
        return memory

    def _copied(self, array: Array) -> ctypes.c_void_p:
        whole = np.ascontiguousarray(array)
        memory, size = self._taken(whole.nbytes), ctypes.c_size_t(whole.nbytes)
        source = whole.ctypes.data_as(ctypes.c_void_p)
        self._expect("aclrtMemcpy", memory, size, source, size, _TO_DEVICE)
        return memory

    def _tensor(self, memory: ctypes.c_void_p, kind: int, shape: Sequence[int]) -> ctypes.c_void_p:
        strides = [int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))]
        dims, steps = ((ctypes.c_int64 * len(shape))(*numbers) for numbers in (shape, strides))
        rank, storage = ctypes.c_uint64(len(shape)), (ctypes.c_int64 * 1)(int(np.prod(shape)))
        single = ctypes.c_uint64(1)
        tensor = self._library.aclCreateTensor(
            dims, rank, kind, steps, ctypes.c_int64(0), _FORMAT_ND, storage, single, memory
        )
        return ctypes.c_void_p(tensor)

    def _run(
        self,
        query: ctypes.c_void_p,
        planes: Sequence[tuple[ctypes.c_void_p, ctypes.c_void_p]],
        output: ctypes.c_void_p,
    ) -> None:
        """Enqueue the call; raise what CANN says if it refuses."""
        heads, number = (1, self._query_heads, 1, _HEAD_SIZE), ctypes.c_int64
        rows = (1, _KV_HEADS, self._keys, _HEAD_SIZE)
        tensors = [self._tensor(memory, _FLOAT16, heads) for memory in (query, output)]
        scales = [self._tensor(scale, _FLOAT, rows[:3]) for _, scale in planes]
        single = ctypes.c_uint64(1)
        lists = [
            ctypes.c_void_p(
                self._library.aclCreateTensorList(
                    (ctypes.c_void_p * 1)(self._tensor(codes, _INT4, rows).value), single
                )
            )
            for codes, _ in planes
        ]
        lengths = ctypes.c_void_p(
            self._library.aclCreateIntArray((ctypes.c_int64 * 1)(self._keys), single)
        )
        size, executor = ctypes.c_uint64(), ctypes.c_void_p()
        try:
            status = getattr(self._library, f"{OPERATOR}GetWorkspaceSize")(
                *(tensors[0], *lists, _NULL, _NULL, _NULL, lengths),
                *(_NULL,) * 10,
                *(scales[0], _NULL, scales[1], *(_NULL,) * 4),
                *(number(self._query_heads), ctypes.c_double(_HEAD_SIZE**-0.5)),
                *(number(_NO_BOUND), number(_NO_BOUND), b"BNSD", number(_KV_HEADS)),
                *(number(0), number(0), number(0), number(0), ctypes.c_bool(False)),
                *(number(_PER_TOKEN_AND_HEAD), number(_PER_TOKEN_AND_HEAD)),
                *(tensors[1], _NULL, ctypes.byref(size), ctypes.byref(executor)),
            )
            if status != 0:
                message = (self._runtime.aclGetRecentErrMsg() or b"").decode(errors="replace")
                raise _RefusedError(f"CANN refuses it with error {status}: {message}")
            workspace = self._taken(size.value) if size.value > 0 else _NULL
            status = getattr(self._library, OPERATOR)(workspace, size, executor, self._stream)
            if status != 0:
                raise RuntimeError(f"the launch fails with error {status}")
        finally:
            for tensor in (*tensors, *scales):
                self._library.aclDestroyTensor(tensor)
            for tensor_list in lists:
                self._library.aclDestroyTensorList(tensor_list)
            self._library.aclDestroyIntArray(lengths)


def _seconds(call: _Call, run: Run, runs: int) -> float:
    call.wait()
    begin = time.perf_counter()
    for _ in range(runs):
        run()
    call.wait()
    return (time.perf_counter() - begin) / runs
