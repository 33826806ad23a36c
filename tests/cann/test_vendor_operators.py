"""CANN's operators as the fake library has them: their formulas, and what they forbid."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import pytest

from tests.cann.fake_acl import FakeAcl
from tests.cann.session import Array
from tests.cann.vendor_operators import (
    BF16,
    BOOL,
    FLOAT,
    FLOAT16,
    INT4,
    INT8,
    INT64,
    INVALID,
    NULL_POINTER,
    Operators,
)  # fmt: skip

pytestmark = pytest.mark.cann

ATTENTION = "aclnnFusedInferAttentionScoreV2"
B, H, N, S, D = 2, 4, 2, 40, 64
LENGTHS = (33, 7)
RNG = np.random.default_rng(0)


@pytest.fixture
def operators(fake: FakeAcl) -> Iterator[Operators]:
    with Operators.load(fake) as loaded:
        yield loaded


def packed(codes: Array) -> Array:
    """INT4 in bytes, the first of two in the low bits."""
    pairs = codes.astype(np.uint8).reshape(*codes.shape[:-1], -1, 2) & 15
    return (pairs[..., 0] | pairs[..., 1] << 4).astype(np.uint8)


def softmax(scores: Array) -> Array:
    shifted = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(shifted / shifted.sum(-1, keepdims=True))


@dataclass
class Call:
    """Arguments of the attention in their order, by the names of its document.

    Attributes:
        given: what there is; others are null.
        inputs: what the query, keys and values stand for.
        out: the address of the output.
    """

    operators: Operators
    given: dict[str, Any]
    inputs: tuple[Array, Array, Array]
    out: int
    lse: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

    NAMES = (
        *("query", "key", "value", "pseShift", "attenMask", "actualSeqLengths"),
        *("actualSeqLengthsKv", "deqScale1", "quantScale1", "deqScale2", "quantScale2"),
        *("quantOffset2", "antiquantScale", "antiquantOffset", "blockTable", "queryPaddingSize"),
        *("kvPaddingSize", "keyAntiquantScale", "keyAntiquantOffset", "valueAntiquantScale"),
        *("valueAntiquantOffset", "keySharedPrefix", "valueSharedPrefix", "actualSharedPrefixLen"),
        *("numHeads", "scaleValue", "preTokens", "nextTokens", "inputLayout", "numKeyValueHeads"),
        *("sparseMode", "innerPrecise", "blockSize", "antiquantMode", "softmaxLseFlag"),
        *("keyAntiquantMode", "valueAntiquantMode", "attentionOut", "softmaxLse"),
    )
    NUMBERS = frozenset(NAMES[24:37])

    def run(self, spare: int = 0) -> int:
        arguments: list[Any] = []
        for name in self.NAMES:
            value: Any = self.given.get(name)
            if name == "scaleValue":
                arguments.append(ctypes.c_double(value))
            elif name == "inputLayout":
                arguments.append(ctypes.c_char_p(value))
            elif name == "softmaxLseFlag":
                arguments.append(ctypes.c_bool(value))
            elif name in self.NUMBERS:
                arguments.append(ctypes.c_int64(value))
            else:
                arguments.append(ctypes.c_void_p(value))
        return self.operators.run(ATTENTION, *arguments, spare=spare)


def attention(operators: Operators, tokens: int = 1) -> Call:
    """A call that is right: INT4 of one query token, else float16."""
    query = RNG.standard_normal((B, H, tokens, D)).astype(np.float16)
    codes = [RNG.integers(-8, 8, (B, N, S, D)) for _ in range(2)]
    scales = [(RNG.standard_normal((B, N, S)) * 0.3).astype(np.float32) for _ in range(2)]
    keys, values = (c * s[..., None] for c, s in zip(codes, scales, strict=True))
    out = operators.memory(np.zeros((B, H, tokens, D), np.float16))
    lse = operators.memory(np.zeros((B, H, tokens, 1), np.float32))
    given: dict[str, Any] = dict.fromkeys(
        ("sparseMode", "innerPrecise", "blockSize", "antiquantMode"), 0
    ) | {
        "query": operators.of(query), "numHeads": H, "scaleValue": D**-0.5,
        "preTokens": 2**31 - 1, "nextTokens": 2**31 - 1, "inputLayout": b"BNSD",
        "numKeyValueHeads": N, "softmaxLseFlag": True,
        "actualSeqLengthsKv": operators.ints(list(LENGTHS)),
        "attentionOut": operators.tensor(out, FLOAT16, (B, H, tokens, D)),
        "softmaxLse": operators.tensor(lse, FLOAT, (B, H, tokens, 1)),
    }  # fmt: skip
    if tokens == 1:
        mode = 3
        for name, each, scale in zip(("key", "value"), codes, scales, strict=True):
            address = operators.memory(packed(each))
            given[name] = operators.list(operators.tensor(address, INT4, (B, N, S, D)))
            given[f"{name}AntiquantScale"] = operators.of(scale)
    else:
        mode = 0
        keys, values = keys.astype(np.float16), values.astype(np.float16)
        for name, vectors in (("key", keys), ("value", values)):
            given[name] = operators.list(operators.of(vectors))
        given["attenMask"] = operators.of(np.triu(np.ones((2048, 2048), np.int8), 1))
        given["sparseMode"] = 3
    given |= {"keyAntiquantMode": mode, "valueAntiquantMode": mode}
    return Call(operators, given, (query, keys, values), out, lse)


@pytest.mark.parametrize("tokens", [1, 5])
def test_attention_by_its_formula(operators: Operators, tokens: int) -> None:
    call = attention(operators, tokens)
    assert call.run() == 0, operators.fake.last_violation()
    out = operators.read(call.out, "float16", (B, H, tokens, D)).astype(np.float64)
    lse = operators.read(call.lse, "float32", (B, H, tokens, 1))[..., 0]
    query, keys, values = (each.astype(np.float64) for each in call.inputs)
    for b, h, t in np.ndindex(B, H, tokens):
        seen = slice(LENGTHS[b] - tokens + t + 1)
        scores = keys[b, h // 2, seen] @ query[b, h, t] * D**-0.5
        expected = softmax(scores) @ values[b, h // 2, seen]
        np.testing.assert_allclose(out[b, h, t], expected, atol=2e-3)
        np.testing.assert_allclose(lse[b, h, t], np.log(np.exp(scores).sum()), atol=2e-3)


def test_four_digits_are_not_exact(operators: Operators) -> None:
    """The formula of the documents has none: the error of the digits is there, and small."""
    call = attention(operators)
    assert call.run() == 0
    lse = operators.read(call.lse, "float32", (B, H, 1, 1))[:, :, 0, 0]
    query, keys, _ = (each.astype(np.float64) for each in call.inputs)
    exact = [
        [np.log(np.exp(keys[b, h // 2, : LENGTHS[b]] @ query[b, h, 0] * D**-0.5).sum())
         for h in range(H)]
        for b in range(B)
    ]  # fmt: skip
    assert 1e-7 < np.abs(lse - exact).max() < 1e-3


_NEVER_READ = {"actualSeqLengths", "preTokens", "nextTokens", "innerPrecise", "antiquantMode: +1"}
UNREAD = {1: {*_NEVER_READ, "sparseMode"}, 5: {*_NEVER_READ, "attenMask: type 12"}}
"""By query tokens: what the operator does not read in this layout and mode, or takes both of."""


def _other_tensors(operators: Operators, made: int) -> Iterator[tuple[str, int | None]]:
    """The same memory as another tensor: other elements, dimensions and strides; and none."""
    address, kind, dims = operators.told[made]
    yield "null", None
    for other in sorted({FLOAT, FLOAT16, INT8, INT64, BOOL, BF16, INT4} - {kind}):
        yield f"type {other}", operators.tensor(address, other, dims)
    for axis, by in product(range(len(dims)), (-1, 1)):
        changed = (*dims[:axis], dims[axis] + by, *dims[axis + 1 :])
        yield f"dimension {axis} {by:+}", operators.tensor(address, kind, changed)
    yield "one more dimension", operators.tensor(address, kind, (1, *dims))
    if len(dims) > 1:
        yield "one dimension less", operators.tensor(address, kind, dims[1:])
        turned = (*range(len(dims) - 2), len(dims) - 1, len(dims) - 2)
        plain = [int(np.prod(dims[i + 1 :])) for i in range(len(dims))]
        strides = tuple(plain[axis] for axis in turned)
        shape = tuple(dims[axis] for axis in turned)
        if sum(each > 1 for each in shape[-2:]) == 2:
            yield "strides", operators.tensor(address, kind, shape, strides)
    yield "other memory", operators.tensor(operators.fake.malloc(16), kind, dims)


_OTHERS: dict[str, tuple[Any, ...]] = {
    "scaleValue": (0.0, 0.5 * D**-0.5, -(D**-0.5), 1.01 * D**-0.5),
    "inputLayout": (b"BSH", b"BSND", b"TND", None),
    "softmaxLseFlag": (False,),
}


def _mutations(call: Call) -> Iterator[tuple[str, str, Any]]:
    """Each argument, what is done to it, and what it is then."""
    operators = call.operators
    for name in Call.NAMES:
        value: Any = call.given.get(name)
        if name == "actualSeqLengthsKv":
            for lengths in ((32, 7), (34, 7), (73, 7), (33, 6), (33, 8), (33, 47), (33,)):
                yield name, str(lengths), operators.ints(list(lengths))
            yield name, "null", None
        elif name in ("key", "value"):
            for told, tensor in _other_tensors(operators, operators.members[value]):
                yield name, told, tensor and operators.list(tensor)
        elif value in operators.told:
            for told, tensor in _other_tensors(operators, value):
                yield name, told, tensor
        elif name in _OTHERS:
            yield from ((name, str(other), other) for other in _OTHERS[name])
        elif name in Call.NUMBERS:
            yield from ((name, f"{by:+}", value + by) for by in (-2, -1, 1, 2, 5))
        elif name in ("actualSeqLengths", "actualSharedPrefixLen"):
            yield from ((name, str(by), operators.ints([by] * B)) for by in (0, 1, 2, S))
        else:  # what is not there is there
            for kind, dims in product((FLOAT, FLOAT16, INT8, INT64), ((1,), (B, N, S))):
                address = operators.fake.malloc(1 << 16)
                yield name, f"type {kind} {dims}", operators.tensor(address, kind, dims)


@pytest.mark.parametrize("tokens", [1, 5])
def test_each_mutation_of_an_argument(operators: Operators, fake: FakeAcl, tokens: int) -> None:
    """It is an error, or other numbers come out: no wrong argument of the host stays unseen."""
    call = attention(operators, tokens)
    sizes = {call.out: B * H * tokens * D * 2, call.lse: B * H * tokens * 4}

    def outputs() -> list[bytes] | None:
        for address, size in sizes.items():
            assert fake.write(address, b"\x7f" * size) == 0
        if call.run() or operators.wait():
            fake.take_violation()
            return None
        return [fake.read(address, size) for address, size in sizes.items()]

    right = outputs()
    assert right is not None
    count, unseen = 0, []
    for name, told, value in _mutations(call):
        before, call.given[name] = call.given.get(name), value
        if not UNREAD[tokens] & {name, f"{name}: {told}"}:
            count += 1
            if outputs() == right:
                unseen.append(f"{name}: {told}")
        call.given[name] = before
    assert not unseen, unseen
    print(f"{count} of {count} mutations of arguments caught")
    assert count > 200


def _tensor(kind: int, dims: tuple[int, ...], strides: tuple[int, ...] | None = None) -> Any:
    return lambda operators: operators.tensor(operators.fake.malloc(1 << 16), kind, dims, strides)


def _list(kind: int, dims: tuple[int, ...], strides: tuple[int, ...] | None = None) -> Any:
    return lambda operators: operators.list(_tensor(kind, dims, strides)(operators))


Given = Callable[[Operators], int] | int | bytes | None
FORBIDDEN: dict[str, tuple[int, dict[str, Given]]] = {
    # by what is wrong: the query's tokens, and the arguments that differ
    "no query": (1, {"query": None}),
    "no output": (1, {"attentionOut": None}),
    "no keys": (1, {"key": None}),
    "a float32 query": (1, {"query": _tensor(FLOAT, (B, H, 1, D))}),
    "a query of rank 3": (1, {"query": _tensor(FLOAT16, (B, H, D))}),
    "a query with strides": (1, {"query": _tensor(FLOAT16, (B, H, 1, D), (D, B * D, D, 1))}),
    "a bfloat16 query of a float16 output": (1, {"query": _tensor(BF16, (B, H, 1, D))}),
    "another output": (1, {"attentionOut": _tensor(FLOAT16, (B, H, 2, D))}),
    "keys of another size": (1, {"key": _list(INT4, (B, N, S, 128))}),
    "keys of a sequence": (1, {"key": _list(INT4, (1, N, S, D))}),
    "keys unlike values": (1, {"key": _list(INT4, (B, N, S + 1, D))}),
    "int8 keys": (1, {"key": _list(INT8, (B, N, S, D)), "value": _list(INT8, (B, N, S, D))}),
    "keys with strides": (1, {"key": _list(INT4, (B, N, S, D), (N * S * D, D, N * D, 1))}),
    "int4 keys of a prompt": (5, {"key": _list(INT4, (B, N, S, D)),
                                  "value": _list(INT4, (B, N, S, D))}),
    "no scale of keys": (1, {"keyAntiquantScale": None}),
    "no scale of values": (1, {"valueAntiquantScale": None}),
    "float16 scales": (1, {"keyAntiquantScale": _tensor(FLOAT16, (B, N, S))}),
    "scales without heads": (1, {"keyAntiquantScale": _tensor(FLOAT, (B, S))}),
    "scales of fewer slots": (1, {"valueAntiquantScale": _tensor(FLOAT, (B, N, S - 1))}),
    "scales with strides": (1, {"keyAntiquantScale": _tensor(FLOAT, (B, N, S), (S, B * S, 1))}),
    "scales of float16 keys": (5, {"keyAntiquantScale": _tensor(FLOAT, (B, N, S))}),
    "an offset of keys": (1, {"keyAntiquantOffset": _tensor(FLOAT, (B, N, S))}),
    "scales of both": (1, {"antiquantScale": _tensor(FLOAT, (2, B, S))}),
    "mode 1 of keys": (1, {"keyAntiquantMode": 1}),
    "mode 6 twice": (1, {"keyAntiquantMode": 6, "valueAntiquantMode": 6}),
    "a mode of float16 keys": (5, {"keyAntiquantMode": 3, "valueAntiquantMode": 3}),
    "another mode of values": (1, {"valueAntiquantMode": 0}),
    "another layout": (1, {"inputLayout": b"BSND"}),
    "no layout": (1, {"inputLayout": None}),
    "other heads": (1, {"numHeads": H + 1}),
    "other KV heads": (1, {"numKeyValueHeads": H}),
    "a length beyond the slots": (1, {"actualSeqLengthsKv": lambda o: o.ints([S + 1, 3])}),
    "a negative length": (1, {"actualSeqLengthsKv": lambda o: o.ints([5, -1])}),
    "no length of some": (1, {"actualSeqLengthsKv": lambda o: o.ints([])}),
    "pages": (1, {"blockTable": _tensor(INT64, (B, 4)), "blockSize": 128}),
    "a block size": (1, {"blockSize": 128}),
    "left padding": (1, {"kvPaddingSize": _tensor(INT64, (1,))}),
    "a prefix": (1, {"keySharedPrefix": _tensor(INT4, (1, N, 4, D))}),
    "a sparse mode that is not there": (5, {"sparseMode": 5}),
    "a causal mode without a mask": (5, {"attenMask": None}),
    "a mask of another size": (5, {"attenMask": _tensor(INT8, (5, S))}),
    "a float mask": (5, {"attenMask": _tensor(FLOAT16, (2048, 2048))}),
    "a precision that is not there": (1, {"innerPrecise": 4}),
    "another antiquant mode": (1, {"antiquantMode": 2}),
    "no lse": (1, {"softmaxLse": None}),
    "a float16 lse": (1, {"softmaxLse": _tensor(FLOAT16, (B, H, 1, 1))}),
    "an lse of another shape": (1, {"softmaxLse": _tensor(FLOAT, (B, H, 1))}),
}  # fmt: skip


@pytest.mark.parametrize("what", FORBIDDEN)
def test_forbidden_arguments(operators: Operators, fake: FakeAcl, what: str) -> None:
    tokens, differing = FORBIDDEN[what]
    call = attention(operators, tokens)
    for name, value in differing.items():
        call.given[name] = value(operators) if callable(value) else value
    assert call.run() in (INVALID, NULL_POINTER)
    assert ATTENTION in fake.take_violation()


def test_keys_outside_of_live_memory(operators: Operators, fake: FakeAcl) -> None:
    call = attention(operators)
    address = fake.malloc(16)
    call.given["keyAntiquantScale"] = operators.tensor(address, FLOAT, (B, N, S))
    assert call.run() == INVALID
    assert "not inside a live block" in fake.take_violation()


def test_a_mask_that_is_not_causal(operators: Operators, fake: FakeAcl) -> None:
    call = attention(operators, 5)
    call.given["attenMask"] = operators.of(np.zeros((2048, 2048), np.int8))
    assert call.run() == 0
    assert operators.wait() != 0
    assert "is not causal" in fake.take_violation()


@pytest.mark.parametrize("spare", [-1, 1])
def test_a_workspace_of_another_size(operators: Operators, fake: FakeAcl, spare: int) -> None:
    assert attention(operators).run(spare) == INVALID
    assert "a workspace of" in fake.take_violation()


def test_a_refusal_is_no_violation(operators: Operators, fake: FakeAcl) -> None:
    call = attention(operators)
    operators.lib.fake_acl_refuse_operator(ATTENTION.encode())
    assert call.run() == INVALID
    assert fake.violations() == 0


def test_dynamic_quant_and_back(operators: Operators) -> None:
    x = RNG.standard_normal((6, D)).astype(np.float16)
    codes, scales, back = (operators.memory(np.zeros(6 * D, np.float32)) for _ in range(3))
    coded = operators.tensor(codes, INT4, (6, D))
    one = operators.of(np.ones(1, np.float32))
    halves = operators.tensor(back, FLOAT16, (6, D))
    null = ctypes.c_void_p()
    rows = operators.tensor(scales, FLOAT, (6,))
    pointers = [ctypes.c_void_p(each) for each in (operators.of(x), coded, rows, one, halves)]
    assert operators.run("aclnnDynamicQuant", pointers[0], null, pointers[1], pointers[2]) == 0
    flags = (ctypes.c_int64(FLOAT16), ctypes.c_bool(False))
    assert operators.run(
        "aclnnAscendAntiQuant", pointers[1], pointers[3], null, *flags, pointers[4]
    ) == 0  # fmt: skip
    steps = operators.read(scales, "float32", (6,))
    np.testing.assert_allclose(steps, np.abs(x.astype(np.float32)).max(-1) / 7, rtol=1e-6)
    decoded = operators.read(back, "float16", (6, D)) * steps[:, None]
    assert np.abs(decoded - x).max() <= steps.max() * 0.501
    assert set(np.unique(operators.read(back, "float16", (6, D)))) <= set(range(-7, 8))
