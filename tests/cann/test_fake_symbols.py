"""The fake runtime has every symbol that the wheel's provider needs of CANN."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.cann

#: C functions of ACL, and C++ names in the namespace ge.
CANN_SYMBOL = re.compile(r"acl[a-z]*[A-Z]\w*|_ZNK?2ge\w*")


def symbols(library: Path, which: str) -> set[str]:
    listed = subprocess.run(
        ["nm", "-D", which, str(library)], check=True, capture_output=True, text=True
    )
    names = {line.split()[-1].partition("@")[0] for line in listed.stdout.splitlines()}
    return {name for name in names if CANN_SYMBOL.fullmatch(name)}


@pytest.fixture(scope="module")
def needed() -> set[str]:
    import onnxruntime

    capi = Path(onnxruntime.__file__).parent / "capi"
    return symbols(capi / "libonnxruntime_providers_cann.so", "--undefined-only")


@pytest.fixture(scope="module")
def provided() -> set[str]:
    for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":"):
        library = Path(folder) / "libascendcl.so"
        if library.is_file():
            return symbols(library, "--defined-only")
    pytest.fail("no libascendcl.so in LD_LIBRARY_PATH; run custom_ops/cann/testing/run.sh")


def test_the_list_of_needed_symbols_is_the_providers(needed: set[str]) -> None:
    """A pattern that matches too little would make the next test pass on nothing."""
    assert {"aclrtMalloc", "aclopCompileAndExecute", "_ZN2ge5GraphC1EPKc"} <= needed
    assert len(needed) == 67


def test_the_fake_has_every_symbol(needed: set[str], provided: set[str]) -> None:
    assert needed - provided == set()


def test_the_provider_is_linked_to_the_three_libraries_of_the_fake() -> None:
    import onnxruntime

    provider = Path(onnxruntime.__file__).parent / "capi" / "libonnxruntime_providers_cann.so"
    dynamic = subprocess.run(
        ["readelf", "-d", str(provider)], check=True, capture_output=True, text=True
    ).stdout
    wanted = set(re.findall(r"Shared library: \[(lib\w+\.so)\]", dynamic))
    assert wanted == {"libascendcl.so", "libacl_op_compiler.so", "libfmk_onnx_parser.so"}
