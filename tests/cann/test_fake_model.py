"""The bundled Qwen3 as it was exported, not converted, in the real wheel on the fake runtime.

Not what a converted model does: its nodes scatter over both providers. It shows that the operators
of the fake runtime, in hundreds of nodes between as many copies, agree with the CPU provider's.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import pytest

from tests.cann.fake_acl import FakeAcl
from tests.cann.session import CANN, CPU, Array, CannSession, on_cpu
from tq_onnx.integrations.bundled import build_bundled

pytestmark = pytest.mark.cann

TOKENS, PAST = 5, 4


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> onnx.ModelProto:
    return onnx.load(build_bundled("dynamo", tmp_path_factory.mktemp("exported")))


@pytest.fixture(scope="module")
def feeds(exported: onnx.ModelProto) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    given: dict[str, Array] = {
        "input_ids": rng.integers(0, 100, (1, TOKENS)),
        "attention_mask": np.ones((1, TOKENS + PAST), np.int64),
        "position_ids": np.arange(PAST, PAST + TOKENS)[None],
    }
    for value in exported.graph.input:
        if value.name not in given:
            _, heads, _, size = (dim.dim_value for dim in value.type.tensor_type.shape.dim)
            given[value.name] = rng.standard_normal((1, heads, PAST, size)).astype(np.float32)
    return given


def with_rope_as_a_product_of_matrices(exported: onnx.ModelProto) -> bytes:
    """Positions times frequencies broadcasts both operands, which the provider computes wrongly.

    [1,T,1] times [D/2] is [1,T,1] @ [1,D/2].
    """
    model = onnx.ModelProto()
    model.CopyFrom(exported)
    (frequencies,) = (w for w in model.graph.initializer if w.name.endswith("inv_freq"))
    row = onnx.numpy_helper.to_array(frequencies).reshape(1, -1)
    (user,) = (node for node in model.graph.node if frequencies.name in node.input)
    assert user.op_type == "Mul"
    assert user.input[1] == frequencies.name
    user.op_type = "MatMul"
    frequencies.CopyFrom(onnx.numpy_helper.from_array(row, frequencies.name))
    del model.graph.value_info[:]
    return model.SerializeToString()


@pytest.mark.parametrize("delay", [0, 300])
def test_all_outputs_agree(
    fake: FakeAcl,
    exported: onnx.ModelProto,
    feeds: dict[str, Array],
    tmp_path: Path,
    delay: int,
) -> None:
    model = with_rope_as_a_product_of_matrices(exported)
    session = CannSession(model, tmp_path)
    fake.set_delay(delay)
    for ours, theirs in zip(session.run(feeds), on_cpu(model, feeds), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    assert {node.provider for node in session.end()} == {CANN, CPU}


# The fake runtime has every symbol that the wheel's provider needs of CANN.


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


# The script for the owner of a card, on the simulated device.


SCRIPT = Path(__file__).parents[2] / "custom_ops" / "cann" / "testing" / "check_operators.py"


def test_all_checks_hold(kernels_named: None) -> None:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "all checks hold", done.stdout + done.stderr
    assert done.returncode == 0
    assert done.stdout.count("yes ") > 50


def test_a_missing_kernel_library_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TQ_ONNX_CANN_KERNELS", str(tmp_path / "absent.so"))
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "absent.so" in done.stdout
