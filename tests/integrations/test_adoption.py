from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.run import run
from tests.files.models import DYNAMO, external, snapshot
from tests.integrations.genai_folder import genai_folder
from tests.integrations.wheels import made_library, made_wheel
from tq_onnx.errors import LibraryError, UnsupportedModelError
from tq_onnx.files import transaction as transaction_module
from tq_onnx.integrations.adoption import adopt_folder, library_for
from tq_onnx.integrations.folderconversion import convert_folder
from tq_onnx.runtime.library import get_library_path, library_name
from tq_onnx.runtime.platforms import LIBRARIES, PLATFORMS, platform_here, platform_of


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adoption")
    return convert_folder(genai_folder(folder / "qwen3"), folder / "out").output


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    for platform in PLATFORMS:
        made_wheel(tmp_path / "wheels", platform)
    return tmp_path / "wheels"


def library_entry(folder: Path) -> str:
    document = json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))
    return str(document["model"]["decoder"]["session_options"]["custom_ops_library"])


def libraries(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} & set(LIBRARIES.values())


def elsewhere() -> list[str]:
    return [name for name in PLATFORMS if name != platform_here()]


def test_the_library_of_this_machine_is_for_this_platform() -> None:
    assert platform_of(get_library_path().read_bytes()) == platform_here()
    assert get_library_path().suffix == Path(library_name()).suffix


@pytest.mark.parametrize("platform", PLATFORMS)
def test_platforms_are_told_by_headers(platform: str) -> None:
    content = made_library(platform)
    assert platform_of(content) == platform
    for damaged in (b"", b"MZ", content[:5], b"#!/bin/sh\n" + content):
        with pytest.raises(LibraryError, match="no library of a platform"):
            platform_of(damaged)


def test_a_folder_goes_round_all_platforms(converted: Path, wheels: Path) -> None:
    before = snapshot(converted)
    for platform in PLATFORMS:
        report = adopt_folder(converted, platform=platform, wheel=wheels)
        name = PLATFORMS[platform].library
        assert (report.platform, report.library) == (platform, name)
        assert libraries(converted) == {name}
        assert (converted / name).read_bytes() == made_library(platform)
        assert library_entry(converted) == name
    report = adopt_folder(converted)
    assert report.source == get_library_path()
    assert snapshot(converted) == before


@pytest.mark.parametrize("platform", elsewhere())
def test_convert_for_another_platform_and_adopt_give_the_same(
    converted: Path, wheels: Path, platform: str, tmp_path: Path
) -> None:
    source = genai_folder(tmp_path / "qwen3")
    out = tmp_path / "out"
    arguments = ("--for", platform, "--wheel", wheels)
    assert run("convert", source, "-o", out, "--json", *arguments).document
    assert libraries(out) == {PLATFORMS[platform].library}
    found = run("adopt", converted, "--json", *arguments).document
    assert found["platform"] == platform
    assert found["source"] == str(next(wheels.glob(f"*{PLATFORMS[platform].tag}*")))
    assert snapshot(converted) == snapshot(out)
    assert f"removed   {PLATFORMS[platform].library}" in run("adopt", converted).out or (
        PLATFORMS[platform].library == library_name()
    )


def test_refusals_leave_the_folder_as_it_is(
    converted: Path, wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot(converted)
    other = elsewhere()[0]
    tag = PLATFORMS[other].tag
    missing = run("adopt", converted, "--for", other).sentence(4)
    assert f"pip download tq-onnx==0.1.0 --no-deps --only-binary :all: --platform {tag}" in missing
    assert "not of" in run(
        "adopt", converted, "--for", other, "--wheel", made_wheel(tmp_path, elsewhere()[1])
    ).sentence(4)
    (tmp_path / "none").mkdir()
    assert "no wheel" in run("adopt", converted, "--wheel", tmp_path / "none").sentence(4)
    (tmp_path / "x.whl").write_bytes(b"no archive")
    assert "cannot be read" in run("adopt", converted, "--wheel", tmp_path / "x.whl").sentence(4)
    assert "is no folder" in run("adopt", tmp_path / "nowhere").sentence(4)
    assert "'plan9'" in run("adopt", converted, "--for", "plan9").sentence(2)
    full = OSError(28, "No space left on device")

    def fail(_: object) -> None:
        raise full

    monkeypatch.setattr(transaction_module, "_sync_folder", fail)
    assert "No space" in run("adopt", converted, "--for", other, "--wheel", wheels).sentence(4)
    assert snapshot(converted) == before


@pytest.mark.parametrize(
    ("libraries", "message"),
    [
        ([("libtq_onnx_ops.so", made_library("macos-arm64"))], "by the name of another"),
        ([("libtq_onnx_ops.so", made_library("linux-arm64", "0" * 16))], "another row layout"),
        ([("libtq_onnx_ops.so", b"\x7fELF")], "no library of a platform"),
        ([("other.so", made_library("linux-arm64"))], "no wheel of tq-onnx"),
        ([(name, made_library("linux-arm64")) for name in LIBRARIES.values()], "no wheel of tq"),
    ],
)
def test_a_wheel_with_another_library_is_refused(
    tmp_path: Path, libraries: list[tuple[str, bytes]], message: str
) -> None:
    wheel = made_wheel(tmp_path, "linux-arm64", *libraries)
    with pytest.raises(LibraryError, match=message), library_for(None, wheel):
        raise AssertionError


def test_only_converted_folders_of_genai_carry_a_library(wheels: Path, tmp_path: Path) -> None:
    original = genai_folder(tmp_path / "qwen3")
    with pytest.raises(UnsupportedModelError, match="was not converted"):
        adopt_folder(original, platform="linux-arm64", wheel=wheels)
    document = json.loads((original / "genai_config.json").read_text())
    document["model"]["decoder"]["session_options"]["custom_ops_library"] = "../x.so"
    (original / "genai_config.json").write_text(json.dumps(document))
    with pytest.raises(UnsupportedModelError, match="not that of tq-onnx"):
        adopt_folder(original, platform="linux-arm64", wheel=wheels)
    plain = external(tmp_path / "plain", DYNAMO)
    with pytest.raises(UnsupportedModelError, match=r"no genai_config\.json"):
        adopt_folder(plain.parent)
    arguments = ("--for", "linux-arm64", "--wheel", wheels)
    for model in (plain, plain.parent):
        assert "only folders of onnxruntime-genai" in run("convert", model, *arguments).sentence(2)
