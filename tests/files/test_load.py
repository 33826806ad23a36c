from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from tests.files.models import DYNAMO, FIXTURES, external, inline
from tq_onnx.errors import ModelFileError, UnsupportedModelError
from tq_onnx.files.load import load


def weights(model: ir.Model) -> dict[str, np.ndarray]:
    return {
        name: value.const_value.numpy()
        for name, value in model.graph.initializers.items()
        if value.const_value is not None
    }


@pytest.mark.parametrize("fixture", sorted(path.stem for path in FIXTURES.glob("*.onnx")))
def test_every_export_loads(fixture: str) -> None:
    path = FIXTURES / f"{fixture}.onnx"
    loaded = load(path)
    assert loaded.path == path.resolve()
    assert loaded.external_files == ()
    proto = onnx.load(path)
    assert loaded.opset == next(e.version for e in proto.opset_import if e.domain == "")
    assert len(loaded.model.graph) == len(proto.graph.node)


def test_external_weights_stay_references(tmp_path: Path) -> None:
    path = external(tmp_path, data=("a.data", "sub/b.data"))
    loaded = load(path)
    assert loaded.external_files == (tmp_path / "a.data", tmp_path / "sub" / "b.data")
    found = [
        value.const_value
        for value in loaded.model.graph.initializers.values()
        if isinstance(value.const_value, ir.ExternalTensor)
    ]
    assert found
    assert all(tensor.raw is None for tensor in found), "a weight was mapped"
    assert {Path(tensor.base_dir) for tensor in found} == {tmp_path}
    here = weights(loaded.model)
    for name, array in weights(load(FIXTURES / f"{DYNAMO}.onnx").model).items():
        np.testing.assert_array_equal(here[name], array)


def test_a_bare_file_name_has_a_base_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    external(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert load(Path("model.onnx")).path == tmp_path / "model.onnx"
    assert load(Path("model.onnx")).external_files == (tmp_path / "model.onnx.data",)


def test_a_link_to_a_model_finds_the_data_beside_its_target(tmp_path: Path) -> None:
    path = external(tmp_path / "store")
    (tmp_path / "link.onnx").symlink_to(path)
    loaded = load(tmp_path / "link.onnx")
    assert loaded.path == path
    assert loaded.external_files == (tmp_path / "store" / "model.onnx.data",)


def hugging_face_cache(root: Path) -> Path:
    """The Hugging Face cache's layout: links in ``snapshots`` to files in ``blobs``."""
    plain = external(root / "plain", data=("model.onnx_data",))
    repository = root / "models--someone--qwen3"
    blobs = repository / "blobs"
    folder = repository / "snapshots" / "0123abcd" / "onnx"
    blobs.mkdir(parents=True)
    folder.mkdir(parents=True)
    for index, name in enumerate(("model.onnx", "model.onnx_data")):
        shutil.move(plain.parent / name, blobs / f"hash{index}")
        (folder / name).symlink_to(Path("../../../blobs") / f"hash{index}")
    return folder / "model.onnx"


def test_the_hugging_face_cache(tmp_path: Path) -> None:
    path = hugging_face_cache(tmp_path)
    loaded = load(path)
    assert loaded.path == path
    assert loaded.external_files == (path.with_name("model.onnx_data"),)
    here = weights(loaded.model)
    for name, array in weights(load(FIXTURES / f"{DYNAMO}.onnx").model).items():
        np.testing.assert_array_equal(here[name], array)
    tensor = next(
        value.const_value
        for value in loaded.model.graph.initializers.values()
        if isinstance(value.const_value, ir.ExternalTensor)
    )
    assert ir.to_proto(tensor).external_data[0].value == "model.onnx_data"


def test_blobs_of_another_repository_are_outside(tmp_path: Path) -> None:
    path = hugging_face_cache(tmp_path)
    other = tmp_path / "models--mallory--x" / "blobs" / "hash1"
    other.parent.mkdir(parents=True)
    data = path.with_name("model.onnx_data")
    shutil.copyfile(data, other)
    data.unlink()
    data.symlink_to(other)
    with pytest.raises(ModelFileError, match="outside"):
        load(path)


def test_a_link_within_the_folder_is_inside(tmp_path: Path) -> None:
    path = external(tmp_path)
    (tmp_path / "real.bin").write_bytes((tmp_path / "model.onnx.data").read_bytes())
    (tmp_path / "model.onnx.data").unlink()
    (tmp_path / "model.onnx.data").symlink_to("real.bin")
    assert load(path).external_files == (tmp_path / "model.onnx.data",)


def test_what_onnx_ir_would_drop_is_refused(tmp_path: Path) -> None:
    path = inline(tmp_path)
    proto = onnx.load(path)
    sparse = proto.graph.sparse_initializer.add()
    sparse.dims.append(4)
    for part, kind in ((sparse.values, onnx.TensorProto.FLOAT), (sparse.indices, 7)):
        part.data_type = kind
        part.dims.append(0)
    sparse.values.name = "s"
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(UnsupportedModelError, match="sparse"):
        load(path)
