"""Sessions that are not made: models that the kernels of CANN cannot run, wrong kernel libraries.

Each is an error of ONNX Runtime with the operator's name and the reason.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simulated_kernels import COMPILER, INTERFACE, TILING_OF
from tests.cann.fake_acl import FakeAcl
from tests.cann.operators import Sizes, decoder_attention
from tests.cann.session import CannSession
from tq_onnx.codec.spec import layout_digest
from tq_onnx.ops.domain import ATTENTION, ENCODE
from tq_onnx.runtime.library import get_library_path

pytestmark = pytest.mark.cann

KERNELS = "TQ_ONNX_CANN_KERNELS"
ON_CANN = "on CANNExecutionProvider: "


DIGEST = f'extern "C" const char* tq_kernels_layout_digest() {{ return "{layout_digest()}"; }}'
KNOWN_INTERFACE = f'extern "C" unsigned tq_kernels_interface() {{ return {INTERFACE}; }}'
CODECS = "lloyd_max or uniform_signed"
CREATIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"encode": {"codec": "uniform"}}, ENCODE, f"codec is uniform with 4 bits, expected {CODECS}"),
    ({"optional": ("feedback",)}, ENCODE, "input feedback is given, expected none"),
    (
        {"attention": {"key_codec": "u8"}},
        ATTENTION,
        f"key_codec is u8 with 4 bits, expected {CODECS}",
    ),
    (
        {"attention": {"value_codec": "prod"}},
        ATTENTION,
        f"value_codec is prod with 4 bits, expected {CODECS}",
    ),
    ({"attention": {"causal": 0}}, ATTENTION, "causal is 0, expected causal"),
    (
        {"attention": {"softcap": 0.5}},
        ATTENTION,
        "softcap is 0.500000, expected none, or 1 to 100",
    ),
    ({"optional": ("attention_bias",)}, ATTENTION, "input attention_bias is given, expected none"),
]


@pytest.mark.parametrize(("options", "op", "message"), CREATIONS)
def test_a_model_that_the_kernels_cannot_run(
    fake: FakeAcl,
    kernels_named: None,
    tmp_path: Path,
    *,
    options: dict[str, Any],
    op: str,
    message: str,
) -> None:
    """At session creation, by the values; on the CPU the same models run."""
    node = "present_key" if op == ENCODE else "attended"
    with pytest.raises(Exception, match=re.escape(f"node '{node}': {op} {ON_CANN}{message}")):
        CannSession(decoder_attention(**options), tmp_path, library=get_library_path())


def test_no_bfloat16(fake: FakeAcl, kernels_named: None, tmp_path: Path) -> None:
    message = f"{ON_CANN}the model has type bfloat16, expected float or float16"
    with pytest.raises(Exception, match=re.escape(message)):
        CannSession(decoder_attention("bfloat16"), tmp_path, library=get_library_path())


def compiled(folder: Path, source: str) -> Path:
    """A library of C++ text."""
    library = folder / "libother.so"
    command = [str(COMPILER), "-x", "c++", "-shared", "-fPIC", "-o", str(library), "-"]
    subprocess.run(command, input=source, text=True, check=True)
    return library


def failing_kernels(folder: Path, error: int, *missing: str) -> Path:
    """A kernel library with all functions but these; each says that it failed."""
    launches = (
        f'extern "C" unsigned tq_launch_{name}() {{ return {error}; }}'
        for name in TILING_OF
        if name not in missing
    )
    return compiled(folder, "\n".join([DIGEST, KNOWN_INTERFACE, *launches]))


def refusal(folder: Path) -> str:
    """What making a session says."""
    with pytest.raises(Exception, match=f"{ENCODE}|{ATTENTION}") as caught:
        CannSession(decoder_attention(), folder, library=get_library_path())
    return str(caught.value)


def test_no_kernel_library(fake: FakeAcl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KERNELS, raising=False)
    beside = get_library_path().resolve().parent / "libtq_kernels_ascend910b.so"
    message = refusal(tmp_path)
    assert f"the kernel library for CANN cannot be opened ({beside}: " in message
    assert f"name it in {KERNELS}" in message


def test_a_named_library_that_is_not_there(
    fake: FakeAcl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KERNELS, str(tmp_path / "none.so"))
    assert f"cannot be opened ({tmp_path / 'none.so'}: " in refusal(tmp_path)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("int other;", "has no function tq_kernels_layout_digest"),
        (
            'extern "C" const char* tq_kernels_layout_digest() { return "0123"; }',
            f"was built for row layout 0123, expected {layout_digest()}",
        ),
        (DIGEST, "has no function tq_kernels_interface"),
        (
            DIGEST + 'extern "C" unsigned tq_kernels_interface() { return 1; }',
            f"has kernels of interface 1, expected {INTERFACE}",
        ),
        (
            DIGEST + KNOWN_INTERFACE,
            "has no function tq_launch_tq_encode_float32",
        ),
    ],
)
def test_another_library(
    fake: FakeAcl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str
) -> None:
    library = compiled(tmp_path, source)
    monkeypatch.setenv(KERNELS, str(library))
    assert f"{library} {message}" in refusal(tmp_path)


def in_a_process(script: str, soc: str, *arguments: Path) -> subprocess.CompletedProcess[str]:
    """Runs a script on another device: the runtime is told once which one it is."""
    imports = (
        "import sys; from pathlib import Path; from simulated_kernels import *\n"
        "from tests.cann.operators import *; from tests.cann.session import *\n"
        "from tq_onnx.runtime.library import get_library_path\n"
    )
    return subprocess.run(
        [sys.executable, "-c", imports + script, *map(str, arguments)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),  # pytest's, with the simulated kernels
            "TQ_FAKE_ACL_SOC": soc,
        },
        capture_output=True,
        text=True,
        check=False,
    )


def test_another_soc(kernels_named: None, tmp_path: Path) -> None:
    script = "CannSession(decoder_attention(), Path(sys.argv[1]), library=get_library_path())"
    ran = in_a_process(script, "Ascend910A", tmp_path)
    assert ran.returncode == 1, ran.stderr
    expected = "the device is 'Ascend910A', expected one of Ascend910B, Ascend910_93"
    assert expected in ran.stderr


@pytest.mark.parametrize(("soc", "cores"), [("Ascend910B1", 48), ("Ascend910B4", 40)])
def test_a_launch_takes_the_cores_that_the_device_has(
    kernels_named: None, tmp_path: Path, soc: str, cores: int
) -> None:
    """A prompt of 64 tasks."""
    script = (
        "folder, library = Path(sys.argv[1]), get_library_path()\n"
        "session = CannSession(decoder_attention(), folder, library=library)\n"
        "sizes, kernels = Sizes(), Kernels(Path(sys.argv[2]))\n"
        "caches = {f'past_{kind}': sizes.empty_cache(64) for kind in ('key', 'value')}\n"
        "session.run({**sizes.vectors(64, 'float32'), **caches, 'past_length': np.array([0])})\n"
        "print(kernels.cores_used)"
    )
    ran = in_a_process(script, soc, tmp_path, Path(os.environ[KERNELS]))
    assert ran.stdout.split() == [str(cores)], ran.stderr


def test_a_launch_that_fails(
    fake: FakeAcl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KERNELS, str(failing_kernels(tmp_path, 7)))
    session = CannSession(decoder_attention(), tmp_path, library=get_library_path())
    with pytest.raises(Exception, match=f"{ENCODE}: its kernel was not enqueued, ACL error 7"):
        session.run(
            {
                **Sizes().vectors(3, "float32"),
                **{f"past_{kind}": Sizes().empty_cache(8) for kind in ("key", "value")},
                "past_length": np.array([4]),
            }
        )
