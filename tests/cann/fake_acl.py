"""The fake ACL runtime of the CANN bench, as a test sees it.

Thin: addresses and errors are numbers, as in ACL. The C side is
``custom_ops/cann/testing/fake_acl/fake_acl.h``.
"""

from __future__ import annotations

import ctypes
import json
from dataclasses import dataclass, field

from simulator import text_of

SUCCESS = 0
INVALID_PARAM = 100000
BAD_ALLOC = 200000

HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE = 1, 2, 3
"""``aclrtMemcpyKind``."""

ALWAYS = 0
"""The seed with which no delay is short by chance."""

Task = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)

_ADDRESS, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_COPY = [_ADDRESS, _SIZE, _ADDRESS, _SIZE, _INT]
_SIGNATURES: dict[str, list[type]] = {
    "aclrtMalloc": [ctypes.POINTER(_ADDRESS), _SIZE, _INT],
    "aclrtFree": [_ADDRESS],
    "aclrtMemcpy": _COPY,
    "aclrtMemcpyAsync": [*_COPY, _ADDRESS],
    "aclrtMemsetAsync": [_ADDRESS, _SIZE, ctypes.c_int32, _SIZE, _ADDRESS],
    "aclrtCreateStream": [ctypes.POINTER(_ADDRESS)],
    "aclrtDestroyStream": [_ADDRESS],
    "aclrtSynchronizeStream": [_ADDRESS],
    "aclrtCreateEvent": [ctypes.POINTER(_ADDRESS)],
    "aclrtDestroyEvent": [_ADDRESS],
    "aclrtRecordEvent": [_ADDRESS, _ADDRESS],
    "aclrtStreamWaitEvent": [_ADDRESS, _ADDRESS],
    "aclrtSynchronizeEvent": [_ADDRESS],
    "aclGetRecentErrMsg": [],
    "fake_acl_enqueue": [_ADDRESS, ctypes.c_char_p, Task, _ADDRESS],
    "fake_acl_alias": [_ADDRESS],
    "fake_acl_is_live": [_ADDRESS, _SIZE],
    "fake_acl_is_device": [_ADDRESS, _SIZE],
    "fake_acl_counts_json": [ctypes.c_char_p, _SIZE],
    "fake_acl_last_violation": [ctypes.c_char_p, _SIZE],
    "fake_acl_reset_counts": [],
    "fake_acl_violations": [],
    "fake_acl_set_delay": [ctypes.c_uint32, ctypes.c_uint32],
    "fake_acl_lengthen_next_copy": [_INT, _SIZE],
}
_RESULTS: dict[str, type | None] = {
    "aclGetRecentErrMsg": ctypes.c_char_p,
    "fake_acl_alias": _ADDRESS,
    "fake_acl_counts_json": _SIZE,
    "fake_acl_last_violation": _SIZE,
    "fake_acl_reset_counts": None,
    "fake_acl_violations": ctypes.c_uint64,
    "fake_acl_set_delay": None,
    "fake_acl_lengthen_next_copy": None,
}


@dataclass
class FakeAcl:
    """The library that the provider in this process uses.

    Attributes:
        acl: Its functions, with their argument types set.
    """

    acl: ctypes.CDLL
    _tasks: list[object] = field(default_factory=list)

    @staticmethod
    def load() -> FakeAcl:
        """Raises ``OSError`` where the loader does not find the library."""
        acl = ctypes.CDLL("libascendcl.so")
        for name, arguments in _SIGNATURES.items():
            function = getattr(acl, name)
            function.argtypes = arguments
            function.restype = _RESULTS.get(name, ctypes.c_int)
        return FakeAcl(acl)

    def counts(self) -> dict[str, int]:
        """Everything counted since the last reset."""
        return dict(json.loads(text_of(self.acl.fake_acl_counts_json)))

    def copies(self) -> dict[str, int]:
        """Copies by direction since the last reset."""
        return {
            name.removeprefix("copy."): count
            for name, count in self.counts().items()
            if name.startswith("copy.")
        }

    def reset(self) -> None:
        """Zero counts, and no message left for the provider, which asks after every node."""
        self.acl.aclGetRecentErrMsg()
        self.acl.fake_acl_reset_counts()

    def violations(self) -> int:
        return int(self.acl.fake_acl_violations())

    def last_violation(self) -> str:
        return text_of(self.acl.fake_acl_last_violation)

    def take_violation(self) -> str:
        """The text of a violation that the test provoked; there must be one."""
        assert self.violations() > 0
        text = self.last_violation()
        self.reset()
        return text

    def set_delay(self, microseconds: int, seed: int = 1) -> None:
        """Has each task of a stream wait a random time below this, or with ``ALWAYS`` this time."""
        self.acl.fake_acl_set_delay(microseconds, seed)

    def malloc(self, size: int) -> int:
        address = _ADDRESS()
        assert self.acl.aclrtMalloc(ctypes.byref(address), size, 0) == SUCCESS
        return int(address.value or 0)

    def create_stream(self) -> int:
        stream = _ADDRESS()
        assert self.acl.aclrtCreateStream(ctypes.byref(stream)) == SUCCESS
        return int(stream.value or 0)

    def create_event(self) -> int:
        event = _ADDRESS()
        assert self.acl.aclrtCreateEvent(ctypes.byref(event)) == SUCCESS
        return int(event.value or 0)

    def write(self, address: int, data: bytes) -> int:
        """Copies to the device; returns the error."""
        size = len(data)
        return int(self.acl.aclrtMemcpy(address, size, data, size, HOST_TO_DEVICE))

    def read(self, address: int, size: int) -> bytes:
        """Copies from the device, in no order with any stream."""
        buffer = ctypes.create_string_buffer(size)
        error = self.acl.aclrtMemcpy(buffer, size, address, size, DEVICE_TO_HOST)
        assert error == SUCCESS, self.last_violation()
        return buffer.raw

    def enqueue(self, stream: int, name: str, task: object, argument: int = 0) -> int:
        """Launches a Python function of an address as a kernel; returns the error."""
        wrapped = Task(task)
        self._tasks.append(wrapped)  # until the stream came to it
        return int(self.acl.fake_acl_enqueue(stream, name.encode(), wrapped, argument))
