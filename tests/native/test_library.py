"""Finding the library and refusing one that does not fit."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import tq_onnx
from tq_onnx.codec.rounding import Rounding
from tq_onnx.codec.spec import layout_digest
from tq_onnx.errors import LibraryError
from tq_onnx.runtime import library
from tq_onnx.runtime.library import get_library_path, library_info
from tq_onnx.runtime.session import registered_options
from tq_onnx.runtime.variables import LIBRARY


def test_the_library_describes_itself() -> None:
    info = library_info()
    assert info.path.is_file()
    assert info.version == tq_onnx.__version__
    assert info.layout_digest == layout_digest()
    assert info.isa == info.isa_supported[0]
    assert set(info.isa_supported) <= set(info.isa_compiled)
    assert info.isa_compiled[-1] == "scalar"
    assert info.products in ("8", "float")
    rows, limit = (32, 32767) if info.isa in {"avx2", "avx512"} else (64, 0)
    assert info.roundings["8"] == Rounding(
        query_steps=127, weight_steps=255, weight_rows=rows, lane_limit=limit
    )


def test_a_library_of_another_machine_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    info = replace(library_info(), isa_supported=("scalar",), isa_of_processor="avx2")
    assert info.problem is not None
    monkeypatch.setattr(library, "library_info", lambda: info)
    with pytest.warns(RuntimeWarning, match=r"for this processor \(avx2\).*TQ_LEVELS=all") as told:
        registered_options()
        registered_options()
    assert len(told) == 1


def test_a_library_of_this_machine_has_no_problem() -> None:
    info = library_info()
    assert info.problem is None
    assert replace(info, isa_supported=("scalar",), isa_of_processor="scalar").problem is None


def test_the_environment_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other.so"
    shutil.copy(get_library_path(), other)
    monkeypatch.setenv(LIBRARY.name, str(other))
    assert get_library_path() == other.resolve()


def test_a_missing_override_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIBRARY.name, str(tmp_path / "none.so"))
    with pytest.raises(LibraryError, match="names no file"):
        get_library_path()


def test_an_installation_without_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LIBRARY.name, raising=False)
    monkeypatch.setattr(library, "_folders", lambda: iter([Path("nowhere")]))
    with pytest.raises(LibraryError, match="not part of this installation"):
        get_library_path()


def test_a_file_that_is_no_library_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setenv(LIBRARY.name, str(broken))
    with pytest.raises(LibraryError, match="cannot be loaded"):
        library_info()


def test_another_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime

    capi = Path(onnxruntime.__file__).parent / "capi"
    other = next(p for p in capi.iterdir() if "providers_shared" in p.name)
    monkeypatch.setenv(LIBRARY.name, str(other))
    with pytest.raises(LibraryError, match="is not a tq-onnx library"):
        library_info()


def test_another_layout_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "layout_digest", lambda: "0123456789abcdef")
    with pytest.raises(LibraryError) as error:
        library_info()
    message = str(error.value)
    assert "0123456789abcdef" in message
    assert layout_digest() in message
    assert "\n" not in message
