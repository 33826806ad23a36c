from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from tests.files.models import external, inline, snapshot
from tests.files.test_load import hugging_face_cache, weights
from tq_onnx.errors import ModelFileError, OutputExistsError, UsageError
from tq_onnx.files import oversize
from tq_onnx.files import save as save_module
from tq_onnx.files import transaction as commit
from tq_onnx.files.load import load
from tq_onnx.files.save import SavedFiles, save
from tq_onnx.progress import Progress

DATA = ("model.onnx.data", "more/part.bin")


def resave(path: Path, output: Path, **options: object) -> SavedFiles:
    loaded = load(path)
    return save(loaded, loaded.model, output, **options)  # type: ignore[arg-type]


def test_beside_the_input_the_data_is_shared(tmp_path: Path) -> None:
    path = external(tmp_path, data=DATA)
    before = snapshot(tmp_path)
    saved = resave(path, tmp_path / "new.onnx")
    assert saved.external_data == "keep"
    assert saved.data == tuple(tmp_path / name for name in DATA)
    assert saved.bytes_written == saved.model.stat().st_size
    after = snapshot(tmp_path)
    assert set(after) - set(before) == {"new.onnx"}
    assert all(after[name] == digest for name, digest in before.items())
    onnx.checker.check_model(str(saved.model))


def test_elsewhere_the_data_is_copied_under_the_same_names(tmp_path: Path) -> None:
    path = external(tmp_path / "in", data=DATA)
    before = snapshot(tmp_path / "in")
    calls: list[Progress] = []
    output = tmp_path / "out" / "deep" / "new.onnx"
    saved = resave(path, output, on_progress=calls.append)
    assert saved.external_data == "copy"
    total = sum((tmp_path / "in" / name).stat().st_size for name in DATA)
    assert calls[-1] == Progress("Copying files", total, total)
    assert saved.bytes_written == total + output.stat().st_size
    files = {name: what for name, what in snapshot(output.parent).items() if what != "folder"}
    assert set(files) == {"new.onnx", *DATA}
    assert all(files[name] == before[name] for name in DATA)
    assert snapshot(tmp_path / "in") == before
    shutil.rmtree(tmp_path / "in")
    onnx.checker.check_model(str(output))
    assert weights(load(output).model)


def test_copying_without_the_kernels_help(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EXDEV, "not here")

    monkeypatch.setattr(commit.os, "copy_file_range", refuse, raising=False)
    path = external(tmp_path / "in")
    resave(path, tmp_path / "out" / "new.onnx")
    name = "model.onnx.data"
    assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "in" / name).read_bytes()


def test_hard_links(tmp_path: Path) -> None:
    path = external(tmp_path / "in", data=DATA)
    saved = resave(path, tmp_path / "out" / "new.onnx", external_data="link")
    assert saved.external_data == "link"
    for name in DATA:
        assert (tmp_path / "out" / name).samefile(tmp_path / "in" / name)
    # Both are still read here, though onnx-ir alone would refuse files with several names.
    assert weights(load(saved.model).model)
    assert weights(load(path).model)
    again = resave(path, tmp_path / "out" / "again.onnx", external_data="link")
    assert again.data == saved.data
    kept = resave(path, tmp_path / "out" / "kept.onnx", external_data="keep")
    assert kept.external_data == "keep"


def test_a_link_across_file_systems_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    path = external(tmp_path / "in")
    monkeypatch.setattr(commit.os, "link", refuse)
    with pytest.raises(ModelFileError, match="file systems"):
        resave(path, tmp_path / "out" / "new.onnx", external_data="link")
    assert not (tmp_path / "out").exists()


def test_the_hugging_face_cache_is_copied_as_files(tmp_path: Path) -> None:
    path = hugging_face_cache(tmp_path)
    saved = resave(path, tmp_path / "out" / "new.onnx")
    assert not saved.data[0].is_symlink()
    onnx.checker.check_model(str(saved.model))
    beside = resave(path, path.with_name("new.onnx"))
    assert beside.model.parent == path.parent
    assert beside.external_data == "keep"


def test_inline_weights_stay_inline(tmp_path: Path) -> None:
    path = inline(tmp_path / "in")
    saved = resave(path, tmp_path / "out" / "new.onnx")
    assert saved.external_data is None
    assert list(snapshot(tmp_path / "out")) == ["new.onnx"]


@pytest.mark.parametrize("mode", ["copy", "link"])
def test_there_is_nothing_to_copy_beside_the_input(tmp_path: Path, mode: str) -> None:
    path = external(tmp_path)
    with pytest.raises(UsageError, match=f"nothing to {mode}"):
        resave(path, tmp_path / "new.onnx", external_data=mode)


def test_data_cannot_be_kept_elsewhere(tmp_path: Path) -> None:
    path = external(tmp_path / "in")
    with pytest.raises(UsageError, match="copy or link"):
        resave(path, tmp_path / "out" / "new.onnx", external_data="keep")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_input_and_its_data_are_safe(tmp_path: Path, overwrite: bool) -> None:
    path = external(tmp_path)
    (tmp_path / "soft.onnx").symlink_to(path)
    before = snapshot(tmp_path)
    for name in (
        "model.onnx",
        "model.onnx.data",
        "soft.onnx",
        "../" + tmp_path.name + "/model.onnx",
    ):
        with pytest.raises(ModelFileError, match="overwrite the input"):
            resave(path, tmp_path / name, overwrite=overwrite)
    assert snapshot(tmp_path) == before


def test_what_exists_is_kept_unless_told_otherwise(tmp_path: Path) -> None:
    path = external(tmp_path / "in")
    out = tmp_path / "out"
    out.mkdir()
    for name in ("new.onnx", "model.onnx.data"):
        (out / name).write_text("precious")
        before = snapshot(out)
        with pytest.raises(OutputExistsError, match=name):
            resave(path, out / "new.onnx")
        assert snapshot(out) == before
        (out / name).unlink()
    for name in ("new.onnx", "model.onnx.data"):
        (out / name).write_text("worthless")
    resave(path, out / "new.onnx", overwrite=True)
    assert set(snapshot(out)) == {"new.onnx", "model.onnx.data"}
    onnx.checker.check_model(str(out / "new.onnx"))


def test_an_output_that_cannot_be(tmp_path: Path) -> None:
    path = external(tmp_path / "in")
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    before = snapshot(tmp_path)
    for name, text in (
        ("folder", "folder"),
        ("pipe", "regular"),
        ("file/new.onnx", "cannot be written"),
        ("elsewhere/model.onnx.data", "name of one of"),
    ):
        with pytest.raises(ModelFileError, match=text):
            resave(path, tmp_path / name, overwrite=True)
    assert snapshot(tmp_path) == before


def test_a_full_disk_is_noticed_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = external(tmp_path / "in")
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(save_module.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ModelFileError, match="1000 are free"):
        resave(path, tmp_path / "out" / "new.onnx")
    assert not (tmp_path / "out").exists()


def hold(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """Let a model file have so many bytes."""
    monkeypatch.setattr(oversize, "MAX_PROTOBUF_BYTES", limit)


def test_weights_that_no_longer_fit_move_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = inline(tmp_path / "in")
    expected = weights(load(path).model)
    before = snapshot(tmp_path / "in")
    loaded = load(path)
    limit = path.stat().st_size * 3 // 4
    hold(monkeypatch, limit)
    saved = save(loaded, loaded.model, tmp_path / "out" / "new.onnx")
    assert saved.moved == tmp_path / "out" / "new.onnx.data"
    assert set(snapshot(tmp_path / "out")) == {"new.onnx", "new.onnx.data"}
    assert saved.model.stat().st_size <= limit
    assert saved.bytes_written == saved.model.stat().st_size + saved.moved.stat().st_size
    onnx.checker.check_model(str(saved.model))
    proto = onnx.load(saved.model, load_external_data=False)
    moved = [tensor for tensor in proto.graph.initializer if tensor.external_data]
    kept = [tensor for tensor in proto.graph.initializer if not tensor.external_data]
    places = [{entry.key: entry.value for entry in tensor.external_data} for tensor in moved]
    assert all(int(place["offset"]) % 65536 == 0 for place in places)
    sizes = [int(place["length"]) for place in places]
    assert min(sizes) >= max(len(tensor.raw_data) for tensor in kept)
    for tensor, array in weights(load(saved.model).model).items():
        np.testing.assert_array_equal(array, expected[tensor])
    assert snapshot(tmp_path / "in") == before
    again = load(path)
    hold(monkeypatch, path.stat().st_size * 2)
    save(again, again.model, tmp_path / "out" / "same.onnx")
    assert not (tmp_path / "out" / "same.onnx.data").exists()


def test_the_new_data_file_takes_no_name_that_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``model.onnx.data`` holds the other weights of this model."""
    path = external(tmp_path / "in")
    proto = onnx.load(path, load_external_data=False)
    big = proto.graph.initializer.add(name="big", data_type=1, dims=[100_000])
    big.raw_data = bytes(400_000)
    path.write_bytes(proto.SerializeToString())
    loaded = load(path)
    output = tmp_path / "out" / "model.onnx"
    hold(monkeypatch, 350_000)
    saved = save(loaded, loaded.model, output)
    assert saved.moved == tmp_path / "out" / "model.onnx.1.data"
    assert saved.data == (tmp_path / "out" / "model.onnx.data",)
    assert load(output).external_files == (tmp_path / "out" / "model.onnx.data", saved.moved)
    for options, passes in (({}, False), ({"overwrite": True}, True)):
        output.unlink()
        again = load(path)
        if passes:
            save(again, again.model, output, **options)  # type: ignore[arg-type]
        else:
            with pytest.raises(OutputExistsError, match=r"model\.onnx\.1\.data"):
                save(again, again.model, output)
            output.touch()


def test_a_graph_too_large_for_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = inline(tmp_path)
    loaded = load(path)
    hold(monkeypatch, 1000)
    with pytest.raises(ModelFileError, match="2 GiB"):
        save(loaded, loaded.model, tmp_path / "new.onnx")
    assert list(snapshot(tmp_path)) == ["model.onnx"]


def test_a_failure_while_weights_move_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = inline(tmp_path)
    for at in (1, 2):
        loaded = load(path)
        with monkeypatch.context() as patch:
            hold(patch, path.stat().st_size * 3 // 4)
            Failing(patch, "fsync", at, OSError(errno.ENOSPC, "No space left"))
            with pytest.raises(ModelFileError, match="No space"):
                save(loaded, loaded.model, tmp_path / "new.onnx")
        assert list(snapshot(tmp_path)) == ["model.onnx"]


def test_data_that_is_there_already_is_taken_as_it_is(tmp_path: Path) -> None:
    path = external(tmp_path / "in", data=DATA)
    out = tmp_path / "out"
    first = resave(path, out / "int4.onnx")
    before = [(out / name).stat().st_ino for name in DATA]
    calls: list[Progress] = []
    second = resave(path, out / "int3.onnx", on_progress=calls.append)
    assert [(out / name).stat().st_ino for name in DATA] == before
    assert second.data == first.data
    assert second.bytes_written == second.model.stat().st_size
    total = sum((out / name).stat().st_size for name in DATA)
    assert calls[-1] == Progress(
        "Comparing files", total, total
    )  # both were compared to their ends
    onnx.checker.check_model(str(second.model))
    third = resave(path, out / "int2.onnx", overwrite=True)
    assert [(out / name).stat().st_ino for name in DATA] == before
    assert third.bytes_written == third.model.stat().st_size


@pytest.mark.parametrize("mode", ["copy", "link"])
def test_data_of_the_same_size_is_compared(tmp_path: Path, mode: str) -> None:
    path = external(tmp_path / "in", data=DATA)
    out = tmp_path / "out"
    resave(path, out / "int4.onnx")
    content = bytearray((out / DATA[1]).read_bytes())
    content[-1] ^= 1
    (out / DATA[1]).write_bytes(content)
    before = snapshot(out)
    with pytest.raises(OutputExistsError, match=r"part\.bin"):
        resave(path, out / "int3.onnx", external_data=mode)
    assert snapshot(out) == before
    with pytest.raises(OutputExistsError, match="reads this file, and the new one has"):
        resave(path, out / "int3.onnx", external_data=mode, overwrite=True)
    assert snapshot(out) == before
    resave(path, out / "int4.onnx", external_data=mode, overwrite=True)
    assert (out / DATA[1]).read_bytes() == (tmp_path / "in" / DATA[1]).read_bytes()
    assert (out / DATA[1]).samefile(tmp_path / "in" / DATA[1]) is (mode == "link")


def test_a_link_is_not_taken_for_the_data(tmp_path: Path) -> None:
    path = external(tmp_path / "in")
    out = tmp_path / "out"
    out.mkdir()
    (tmp_path / "twin").write_bytes((tmp_path / "in" / "model.onnx.data").read_bytes())
    (out / "model.onnx.data").symlink_to(tmp_path / "twin")
    with pytest.raises(OutputExistsError, match=r"model\.onnx\.data"):
        resave(path, out / "new.onnx")
    resave(path, out / "new.onnx", overwrite=True)
    assert not (out / "model.onnx.data").is_symlink()


class Failing:
    """Makes the n-th call of a function of ``os`` fail, and counts calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, at: int, error: BaseException):
        self.calls = 0
        self.at = at
        real = getattr(os, name)

        def call(*arguments: object, **options: object) -> object:
            self.calls += 1
            if self.calls == self.at:
                raise error
            return real(*arguments, **options)

        monkeypatch.setattr(commit.os, name, call)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()])
@pytest.mark.parametrize("name", ["fsync", "write", "link", "copy_file_range"])
def test_a_failure_anywhere_leaves_everything_as_it_was(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    error: BaseException,
    overwrite: bool,
) -> None:
    path = external(tmp_path / "in", data=DATA)
    if overwrite:
        resave(path, tmp_path / "out" / "new.onnx")
        for item in ("new.onnx", *DATA):
            with (tmp_path / "out" / item).open("ab") as file:
                file.write(b"old")
    before = snapshot(tmp_path)
    expected = ModelFileError if isinstance(error, OSError) else type(error)
    completed = False
    for at in range(1, 40):
        with monkeypatch.context() as patch:
            failing = Failing(patch, name, at, error)
            try:
                resave(path, tmp_path / "out" / "new.onnx", overwrite=overwrite)
            except expected:
                failed = True
            else:
                failed = False
        if failed:
            assert snapshot(tmp_path) == before, at
        elif failing.calls < at:
            completed = True
            break
        else:  # a way round was found: no hard links here, no kernel copy there
            left = snapshot(tmp_path / "out")
            assert not [item for item in left if item.endswith((".tmp", ".old"))], at
            shutil.rmtree(tmp_path / "out")
            if overwrite:
                resave(path, tmp_path / "out" / "new.onnx")
                for item in ("new.onnx", *DATA):
                    with (tmp_path / "out" / item).open("ab") as file:
                        file.write(b"old")
    assert completed


def test_changed_tensors_do_not_touch_the_others(tmp_path: Path) -> None:
    path = external(tmp_path / "in")
    loaded = load(path)
    loaded.model.graph.register_initializer(
        ir.Value(name="extra", const_value=ir.tensor([1.0, 2.0], name="extra"))
    )
    saved = save(loaded, loaded.model, tmp_path / "in" / "new.onnx")
    old = {t.name: t for t in onnx.load(path, load_external_data=False).graph.initializer}
    new = {t.name: t for t in onnx.load(saved.model, load_external_data=False).graph.initializer}
    assert set(new) - set(old) == {"extra"}
    assert all(new[name].external_data == tensor.external_data for name, tensor in old.items())
