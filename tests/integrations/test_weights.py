"""A safetensors file is read, and refused as soon as something in it does not add up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tq_onnx.errors import ModelFileError
from tq_onnx.integrations.weights import read_safetensors

HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F16", "shape": [2, 3], "data_offsets": [0, 12]},
    "b": {"dtype": "F32", "shape": [2], "data_offsets": [12, 20]},
}
DATA = np.arange(6, dtype="<f2").tobytes() + np.array([0.5, -2], "<f4").tobytes()


def file_of(header: Any, data: bytes = DATA) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def changed(name: str, **fields: Any) -> dict[str, Any]:
    return HEADER | {name: {**HEADER[name], **fields}}


def write(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    return path


def test_tensors_keep_values_shape_and_dtype(tmp_path: Path) -> None:
    tensors = read_safetensors(write(tmp_path, file_of(HEADER)))
    assert list(tensors) == ["a", "b"]
    np.testing.assert_array_equal(tensors["a"], np.arange(6, dtype=np.float16).reshape(2, 3))
    np.testing.assert_array_equal(tensors["b"], np.array([0.5, -2], np.float32))
    assert (tensors["a"].dtype, tensors["b"].dtype) == (np.float16, np.float32)


def test_a_scalar_and_an_empty_tensor_are_tensors(tmp_path: Path) -> None:
    header = {
        "scalar": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
        "empty": {"dtype": "F32", "shape": [0, 7], "data_offsets": [4, 4]},
    }
    tensors = read_safetensors(write(tmp_path, file_of(header, b"\0\0\x80\x3f")))
    assert tensors["scalar"] == 1.0
    assert tensors["empty"].shape == (0, 7)


HOSTILE = {
    "nothing": b"",
    "seven bytes": b"\x01" * 7,
    "header longer than the file": (1 << 20).to_bytes(8, "little") + b"{}",
    "header length at its maximum": b"\xff" * 8 + b"{}",
    "not JSON": file_of(b"{"),
    "not UTF-8": file_of(b'{"\xff": 1}'),
    "deeply nested": file_of(b"[" * 100_000),
    "a list": file_of([]),
    "an entry that is a number": file_of(HEADER | {"a": 3}),
    "no dtype": file_of(HEADER | {"a": {"shape": [2, 3], "data_offsets": [0, 12]}}),
    "unknown dtype": file_of(changed("a", dtype="I16")),
    "dtype of another type": file_of(changed("a", dtype=["F16"])),
    "negative size": file_of(changed("a", shape=[-2, -3])),
    "fractional size": file_of(changed("a", shape=[1.5, 4])),
    "boolean size": file_of(changed("a", shape=[True, 6])),
    "shape that is a string": file_of(changed("a", shape="23")),
    "shape larger than the data": file_of(changed("a", shape=[2, 4])),
    "shape that overflows 64 bits": file_of(changed("a", shape=[1 << 40, 1 << 40])),
    "offsets swapped": file_of(changed("a", data_offsets=[12, 0])),
    "three offsets": file_of(changed("a", data_offsets=[0, 6, 12])),
    "offsets past the end": file_of(changed("b", data_offsets=[16, 24])),
    "negative offset": file_of(changed("a", data_offsets=[-12, 0])),
    "truncated": file_of(HEADER)[:-1],
    "bytes that belong to no tensor": file_of(HEADER, DATA + b"\0"),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_file_is_refused_in_one_sentence(tmp_path: Path, content: bytes) -> None:
    path = write(tmp_path, content)
    with pytest.raises(ModelFileError) as caught:
        read_safetensors(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    assert len(message) < 300 + len(str(path))


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.safetensors", tmp_path):
        with pytest.raises(ModelFileError, match="cannot be read"):
            read_safetensors(path)


@settings(max_examples=200)
@given(data=st.data())
def test_no_change_of_a_file_gives_anything_but_tensors_or_a_refusal(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(file_of(HEADER))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(0, len(content)))]
    path = tmp_path_factory.getbasetemp() / "mutated.safetensors"
    path.write_bytes(content)
    try:
        tensors = read_safetensors(path)
    except ModelFileError:
        return
    assert sum(tensor.nbytes for tensor in tensors.values()) <= len(content)
