"""What the Ascend C shim refuses: each kernel of ``shim/faults.cpp`` does one thing wrong."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest

from simulated_kernels import (
    ARCHITECTURES,
    COMPILER,
    SHIM,
    aligned_copy,
    compile_library,
    flags,
)
from simulator import Simulator

pytestmark = pytest.mark.cann

MESSAGES = {
    "none": "",
    "no MTE2_V": "Add on V is not ordered behind MTE2",
    "no V_MTE3": "DataCopy on MTE3 is not ordered behind V",
    "no barrier": "Muls on V is not ordered behind V",
    "no V_MTE2": "DataCopy on MTE2 is not ordered behind V",
    "no MTE3_V": "Add on V is not ordered behind MTE3",
    "no V_S": "GetValue on S is not ordered behind V",
    "no S_V": "Add on V is not ordered behind S",
    "flags by a third pipe": "",
    "never written": "which nobody wrote",
    "beyond a buffer": "Duplicate of 65 elements in 64",
    "scalar beyond a buffer": "a scalar access leaves its local tensor",
    "half a block": "DataCopy of 48 bytes, which is not a positive multiple of 32",
    "unaligned": "Duplicate is not aligned to 32 bytes",
    "no such memory": "outside of every live block",
    "beyond a global tensor": "DataCopy leaves its global tensor",
    "set twice": "flag V_S 1 is set twice",
    "never set": "flag V_S 1 is waited for and not set",
    "left set": "flag V_S 1 is left set",
    "no such event": "event 8 does not exist",
    "too much UB": "UB overflow",
    "too many buffers": "65 buffers, of 64 at most",
    "overlapping stores": "overlaps an earlier store without PipeBarrier<PIPE_MTE3>",
    "ordered stores": "",
    "mask before repeats": "BlockReduceSum: the shim takes whole repeats",
    "gather beyond": "Gather's offset 256 is not in its source",
    "gather of too many repeats": "Gather of 256 whole repeats, of 255 at most",
    "counts of the API": "",
    "large mask": "Add with a mask of 65",
    "overlap": "Add has operands that overlap",
    "reads its own": "Add reads what it wrote itself",
    "part of a comparison": "CompareScalar takes whole 256 bytes",
    "loads what it stored": "reads an earlier store that it has not waited for",
    "loads it behind a flag": "",
}
ONLY = {
    2201: {"padding": "which nobody wrote", "rounding of a cast": "", "stores to one line": ""},
    2002: {
        "rounding of a cast": "Cast does not have this rounding",
        "stores to one line": "overlaps an earlier store without PipeBarrier<PIPE_MTE3>",
    },
}
"""What differs between the architectures."""


@pytest.fixture(scope="module", params=ARCHITECTURES)
def shim(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Simulator:
    if COMPILER is None:
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("shim")
    return Simulator(compile_library(request.param, SHIM / "faults.cpp", folder, optimize=["-O0"]))


def _run(shim: Simulator, name: str, cores: int = 1) -> list[str]:
    memory = aligned_copy(np.zeros(1024, np.uint8))
    shim.reset()
    with shim.device_memory([memory]) as (address,):
        status = shim.call(
            "tq_fault", name.encode(), ctypes.c_void_p(address), ctypes.c_uint32(cores)
        )
    assert (status != 0) == (shim.hazards > 0)
    return shim.messages()


def test_faults_are_seen(shim: Simulator) -> None:
    expected = MESSAGES | ONLY[shim.arch]
    for name, message in expected.items():
        found = _run(shim, name)
        if message:
            assert any(message in one for one in found), (name, found)
        else:
            assert not found, (name, found)
    assert shim.call("tq_faults") == len(expected) + 3  # those below


def test_what_the_api_issues_by_itself_is_counted(shim: Simulator) -> None:
    """CANN's code spreads the scalar of Select, and cuts the rest from Gather's whole repeats."""
    with shim.counted() as launches:
        _run(shim, "counts of the API")
    (core,) = launches[0].cores
    assert {one.name: (one.instructions, one.repeats) for one in core.vector} == {
        **{"CompareScalar": (1, 1), "Select": (1, 1), "Select's scalar": (1, 1)},
        **{"Duplicate": (1, 2), "Gather": (2, 2)},
    }
    own, end = 2, 1
    assert core.barriers == own + end + (2 if shim.arch == 2201 else 3)


def test_cores_may_not_write_the_same(shim: Simulator) -> None:
    assert not _run(shim, "cores write the same", cores=1)
    assert "cores 0 and 1 write the same global memory" in _run(
        shim, "cores write the same", cores=2
    )


def test_cores_may_not_read_what_others_write(shim: Simulator) -> None:
    assert not _run(shim, "reads what is written", cores=1)
    assert "core 0 reads global memory that another one writes" in _run(
        shim, "reads what is written", cores=2
    )


def test_cores_of_2002_may_not_share_a_line(shim: Simulator) -> None:
    found = _run(shim, "cores in one line", cores=2)
    expected = ["cores 0 and 1 write one 32-byte line"] if shim.arch == 2002 else []
    assert found == expected


def test_freed_memory_is_not_live(shim: Simulator) -> None:
    memory = np.zeros(1024, np.uint8)
    with shim.device_memory([memory]) as (address,):
        pass
    shim.reset()
    shim.call("tq_fault", b"none", ctypes.c_void_p(address), ctypes.c_uint32(1))
    assert any("outside of every live block" in message for message in shim.messages())


REFUSED = {
    "a pair of types": (
        "Cast(LocalTensor<half>(), LocalTensor<int32_t>(), mode, 8);",
        (2201, 2002),
    ),
    "bytes to duplicate": ("Duplicate(LocalTensor<uint8_t>(), uint8_t(1), 8);", (2201, 2002)),
    "bytes to gather": (
        "Gather(LocalTensor<uint8_t>(), LocalTensor<uint8_t>(), LocalTensor<uint32_t>(), 0u, 8u);",
        (2201, 2002),
    ),
    "copies of elements": (
        "Brcb(LocalTensor<float>(), LocalTensor<float>(), 1, {1, 8});",
        (2002,),
    ),
    "transfers of 2201": (
        "DataCopyPad(GlobalTensor<float>(), LocalTensor<float>(), {1, 4, 0, 0, 0});",
        (2002,),
    ),
}


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_compile(tmp_path: Path, what: str) -> None:
    statement, refused_by = REFUSED[what]
    source = tmp_path / "one.cpp"
    source.write_text(
        '#include "kernel_operator.h"\n'
        "using namespace AscendC;\n"
        f"void kernel(RoundMode mode) {{ (void)mode; {statement} }}\n",
        encoding="utf-8",
    )
    for arch in ARCHITECTURES:
        command = [str(COMPILER), *flags(arch), "-c", str(source), "-o", "/dev/null"]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (made.returncode != 0) == (arch in refused_by), made.stderr


def test_every_file_of_the_shim_says_that_it_is_one() -> None:
    for path in SHIM.iterdir():
        assert path.read_text(encoding="utf-8").startswith("//"), path
