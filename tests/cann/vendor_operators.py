"""CANN's operators of the fake ``libopapi.so``, called as the host code calls them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.cann.fake_acl import FakeAcl
from tests.cann.session import Array

FLOAT, FLOAT16, INT8, INT64, BOOL, BF16, INT4 = 0, 1, 2, 9, 12, 27, 29
"""``aclDataType``."""
TYPE_OF = {"float32": FLOAT, "float16": FLOAT16, "int8": INT8, "bool": BOOL, "int64": INT64}
NULL_POINTER, INVALID = 161001, 161002

_ADDRESS, _I64, _U64 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint64


@dataclass
class Operators:
    """The library, with a stream and what a test made.

    Attributes:
        fake: the runtime that it runs on.
        lib: its functions.
        stream: of all calls.
        told: address, elements and dimensions of tensors.
        members: the tensors of lists.
    """

    fake: FakeAcl
    lib: ctypes.CDLL
    stream: int
    told: dict[int, tuple[int, int, tuple[int, ...]]] = field(default_factory=dict)
    members: dict[int, int] = field(default_factory=dict)
    _made: list[tuple[str, int]] = field(default_factory=list)

    @staticmethod
    @contextmanager
    def load(fake: FakeAcl) -> Iterator[Operators]:
        """Opens it; destroys what was made, at the end."""
        lib = ctypes.CDLL("libopapi.so")
        for name in ("aclCreateTensor", "aclCreateTensorList", "aclCreateIntArray"):
            getattr(lib, name).restype = _ADDRESS
        lib.fake_acl_live_objects.restype = ctypes.c_size_t
        operators = Operators(fake, lib, fake.create_stream())
        before = lib.fake_acl_live_objects()
        yield operators
        for function, thing in reversed(operators._made):
            getattr(lib, function)(_ADDRESS(thing))
        lib.fake_acl_refuse_operator(None)
        assert lib.fake_acl_live_objects() == before

    def memory(self, array: Array) -> int:
        """Device memory with the bytes of an array."""
        address = self.fake.malloc(max(1, array.nbytes))
        assert self.fake.write(address, np.ascontiguousarray(array).tobytes()) == 0
        return address

    def tensor(
        self,
        address: int,
        kind: int,
        dims: tuple[int, ...],
        strides: tuple[int, ...] | None = None,
    ) -> int:
        """A tensor over device memory; contiguous without ``strides``."""
        if strides is None:
            strides = tuple(int(np.prod(dims[i + 1 :])) for i in range(len(dims)))
        storage = (1 + sum((d - 1) * s for d, s in zip(dims, strides, strict=True)),)
        numbers = [(_I64 * len(each))(*each) for each in (dims, strides, storage)]
        made = self.lib.aclCreateTensor(
            numbers[0], _U64(len(dims)), kind, numbers[1], _I64(0), 2, numbers[2], _U64(1),
            _ADDRESS(address),
        )  # fmt: skip
        self._made.append(("aclDestroyTensor", made))
        self.told[int(made)] = address, kind, dims
        return int(made)

    def of(self, array: Array) -> int:
        """A tensor like an array, with its elements."""
        return self.tensor(self.memory(array), TYPE_OF[array.dtype.name], array.shape)

    def ints(self, values: list[int]) -> int:
        made = self.lib.aclCreateIntArray((_I64 * len(values))(*values), _U64(len(values)))
        self._made.append(("aclDestroyIntArray", made))
        return int(made)

    def list(self, tensor: int) -> int:
        """A list that owns the tensor."""
        made = self.lib.aclCreateTensorList((_ADDRESS * 1)(tensor), _U64(1))
        self._made.remove(("aclDestroyTensor", tensor))
        self._made.append(("aclDestroyTensorList", made))
        self.members[int(made)] = tensor
        return int(made)

    def run(self, name: str, *arguments: Any, spare: int = 0) -> int:
        """Both phases; the first one's error, or that of the second.

        Args:
            name: of the operator.
            arguments: of its first phase, without its results.
            spare: bytes that the workspace has more than was planned.
        """
        size, executor = _U64(), _ADDRESS()
        status = getattr(self.lib, name + "GetWorkspaceSize")(
            *arguments, ctypes.byref(size), ctypes.byref(executor)
        )
        if status:
            return int(status)
        workspace = self.fake.malloc(size.value + max(spare, 0)) if size.value + spare > 0 else 0
        return int(
            getattr(self.lib, name)(
                _ADDRESS(workspace), _U64(size.value + spare), executor, _ADDRESS(self.stream)
            )
        )

    def wait(self) -> int:
        return int(self.fake.acl.aclrtSynchronizeStream(_ADDRESS(self.stream)))

    def read(self, address: int, dtype: str, shape: tuple[int, ...]) -> Array:
        """What the device has there, after everything that was enqueued."""
        assert self.wait() == 0, self.fake.last_violation()
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return np.frombuffer(self.fake.read(address, size), dtype).reshape(shape)
