from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.files.models import external
from tests.native.single_node import attention_model
from tests.runtime.models import CONVERTIBLE, DYNAMO, GENAI, converted, original
from tq_onnx.errors import LibraryError, ModelFileError, TqOnnxError, UnsupportedModelError
from tq_onnx.runtime import memory
from tq_onnx.runtime.decoder import Decoder
from tq_onnx.runtime.errors import run_error
from tq_onnx.runtime.library import library_info
from tq_onnx.runtime.session import (
    available_providers,
    check_library,
    make_session,
    placement,
    ports,
    vocabulary_size,
)
from tq_onnx.runtime.signature import plan_of, signature_of


def one_sentence(error: TqOnnxError) -> str:
    text = str(error)
    assert "\n" not in text
    assert "[ONNXRuntimeError]" not in text
    assert "/onnxruntime/" not in text
    return text


@pytest.mark.parametrize("name", CONVERTIBLE)
def test_nodes_run_on_kernels_with_the_library_and_are_inlined_without(name: str) -> None:
    kernels = placement(make_session(converted(name), library=True, threads=1))
    assert (kernels.encode, kernels.attention) == (4, 2)
    assert kernels.uses_library
    assert kernels.providers == ("CPUExecutionProvider",)
    bodies = placement(make_session(converted(name), library=False, threads=1))
    assert (bodies.encode, bodies.attention) == (0, 0)
    assert not bodies.uses_library
    assert bodies.nodes > kernels.nodes


def test_only_the_cpu_provider_is_used() -> None:
    session = make_session(original(DYNAMO), library=False, threads=1)
    assert session.get_providers() == ["CPUExecutionProvider"]
    assert "CPUExecutionProvider" in available_providers()


def test_a_session_needs_no_library_if_none_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_ONNX_LIBRARY", "nowhere.so")
    make_session(converted(DYNAMO), library=False, threads=1)
    with pytest.raises(LibraryError, match=r"nowhere\.so"):
        make_session(converted(DYNAMO), library=True, threads=1)


def test_a_file_that_is_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "library.so"
    path.write_text("this is no library")
    monkeypatch.setenv("TQ_ONNX_LIBRARY", str(path))
    with pytest.raises(LibraryError) as caught:
        check_library()
    assert str(path) in one_sentence(caught.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="there is no such file"):
        make_session(tmp_path / "model.onnx", library=False)


@pytest.mark.parametrize("content", [b"not a model", b"\x00" * 64, b"\x08\x08\xff\xff"])
def test_a_file_that_is_no_model(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(TqOnnxError) as caught:
        make_session(path, library=False)
    assert str(path) in one_sentence(caught.value)
    assert caught.value.exit_code in (3, 4)


def test_missing_external_data(tmp_path: Path) -> None:
    path = external(tmp_path)
    make_session(path, library=False, threads=1)
    (tmp_path / "model.onnx.data").unlink()
    with pytest.raises(ModelFileError, match=r"model\.onnx\.data") as caught:
        make_session(path, library=False, threads=1)
    one_sentence(caught.value)


def test_a_graph_that_onnxruntime_refuses(tmp_path: Path) -> None:
    proto = onnx.load(original(DYNAMO))
    proto.graph.node[0].op_type = "NoSuchOperator"
    path = tmp_path / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(UnsupportedModelError, match="NoSuchOperator") as caught:
        make_session(path, library=False, threads=1)
    one_sentence(caught.value)


def test_bytes_with_external_data_elsewhere(tmp_path: Path) -> None:
    path = external(tmp_path)
    session = make_session(path.read_bytes(), library=False, threads=1, external_data=tmp_path)
    assert ports(session) == ports(make_session(path, library=False, threads=1))


def test_ports_keep_order_and_dimensions() -> None:
    inputs, outputs = ports(make_session(original(GENAI), library=False, threads=1))
    assert [port.name for port in inputs][:2] == ["input_ids", "attention_mask"]
    assert outputs[0].name == "logits"
    assert outputs[0].shape[-1] == 97
    assert str(inputs[0]).startswith("tensor(int64)[")


def test_the_vocabulary_must_be_stated() -> None:
    session = make_session(original(DYNAMO), library=False, threads=1)
    assert vocabulary_size(session, "logits") == 97
    with pytest.raises(UnsupportedModelError, match="nothing"):
        vocabulary_size(session, "nothing")


def test_a_model_in_a_folder_with_an_odd_name(tmp_path: Path) -> None:
    folder = tmp_path / "möbel und [farbe]"
    folder.mkdir()
    path = Path(shutil.copyfile(original(DYNAMO), folder / "mo del.onnx"))
    make_session(path, library=False, threads=1)


def test_an_exact_session_multiplies_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    def logits(exact: bool) -> bytes:
        session = make_session(converted(DYNAMO), threads=1, exact=exact)
        plan = plan_of(session)
        assert plan is not None
        decoder = Decoder(session, signature_of(session, plan))
        return decoder.prefill(np.arange(1, 40)[None]).tobytes()

    monkeypatch.setenv("TQ_ONNX_PRODUCTS", "float")
    floats = logits(exact=False)
    monkeypatch.setenv("TQ_ONNX_PRODUCTS", "8")
    assert logits(exact=True) == floats
    assert os.environ["TQ_ONNX_PRODUCTS"] == "8"
    monkeypatch.delenv("TQ_ONNX_PRODUCTS")
    assert logits(exact=True) == floats
    assert "TQ_ONNX_PRODUCTS" not in os.environ


def test_steps_have_products_of_8_bits_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    def step() -> bytes:
        session = make_session(converted(DYNAMO), threads=1)
        plan = plan_of(session)
        assert plan is not None
        decoder = Decoder(session, signature_of(session, plan))
        decoder.prefill(np.arange(1, 90)[None])
        return decoder.step([7]).tobytes()

    found = {}
    for isa in library_info().isa_supported:
        monkeypatch.setenv("TQ_ONNX_ISA", isa)
        for products in ("float", "8"):
            monkeypatch.setenv("TQ_ONNX_PRODUCTS", products)
            found[products] = step()
        monkeypatch.delenv("TQ_ONNX_PRODUCTS")
        assert found["8"] != found["float"]
        assert step() == found["float" if isa == "scalar" else "8"]


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("cos_cache dimension 0 shall not be less than total_sequence_length.", "longer than the"),
        ("cos_cache dimension 1 must be <= head_size / 2 and a multiple of 8.", "cannot run the"),
    ],
)
def test_a_table_of_positions_that_is_short_or_of_another_width(said: str, told: str) -> None:
    assert told in str(run_error(RuntimeError(said), "model.onnx"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TQ_ONNX_PRODUCTS", "7"),
        ("TQ_ONNX_PRODUCTS", "16"),
        ("TQ_ONNX_SKIP_BELOW", "1"),
        ("TQ_ONNX_SKIP_BELOW", "few"),
    ],
)
def test_values_that_kernels_refuse(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(LibraryError, match=f"{name} is '{value}'.*unset it"):
        make_session(attention_model(), library=True)


# What a process may still take: the machine, and the limits of containers.


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 100 kB\n")
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "_MOUNT", tmp_path / "mount")
    return tmp_path


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_max", ".max").replace("_current", ".current")).write_text(
            f"{text}\n"
        )


def test_without_groups_the_machine_counts(groups: Path) -> None:
    assert memory.free_memory() == 100 << 10
    (groups / "meminfo").write_text("nothing\n")
    assert memory.free_memory() is None


@pytest.mark.parametrize("path", ["/", "/docker/0123", "/../../elsewhere"])
def test_version_2(groups: Path, path: str) -> None:
    """In a container, the path is often one that only the host knows."""
    (groups / "cgroup").write_text(f"0::{path}\n")
    write(groups / "mount", memory_max=50_000, memory_current=20_000)
    assert memory.free_memory() == 30_000
    (groups / "mount" / "memory.stat").write_text("anon 1\ninactive_file 5000\n")
    assert memory.free_memory() == 35_000
    write(groups / "mount", memory_max="max")
    assert memory.free_memory() == 100 << 10


def test_a_group_around_it_counts_too(groups: Path) -> None:
    (groups / "cgroup").write_text("0::/a/b\n")
    write(groups / "mount" / "a" / "b", memory_max=90_000, memory_current=10_000)
    assert memory.free_memory() == 80_000
    write(groups / "mount" / "a", memory_max=60_000, memory_current=70_000)
    assert memory.free_memory() == 0


def test_version_1(groups: Path) -> None:
    (groups / "cgroup").write_text("5:cpu,memory:/box\n4:pids:/box\n")
    folder = groups / "mount" / "memory" / "box"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text("70000")
    (folder / "memory.usage_in_bytes").write_text("30000")
    assert memory.free_memory() == 40_000
    (folder / "memory.limit_in_bytes").write_text("9223372036854771712")
    assert memory.free_memory() == 100 << 10
