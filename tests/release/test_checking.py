from __future__ import annotations

import base64
import hashlib
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.wheels import made_library
from tq_onnx.runtime.library import get_library_path
from tq_onnx.runtime.platforms import LIBRARY_FOLDER, PLATFORMS, platform_here
from tq_onnx.version import __version__

lief = pytest.importorskip("lief")
if platform_here() not in PLATFORMS:
    pytest.skip("there are no wheels for this platform", allow_module_level=True)

# Behind the installed package: release/ is no part of it, and tq_onnx lies beside release/, too.
sys.path.append(str(Path(__file__).parents[2]))
from release import building, checking, emulating, trying  # noqa: E402

HERE = PLATFORMS[platform_here()]
INFO = f"tq_onnx-{__version__}.dist-info"
LIBRARY = f"{LIBRARY_FOLDER}/{HERE.library}"
Contents = dict[str, bytes]


def contents() -> Contents:
    """What a sound wheel for this machine has in it."""
    return {
        "tq_onnx/py.typed": b"",
        "tq_onnx/bundled/model.safetensors": b"weights",
        LIBRARY: get_library_path().read_bytes(),
        f"{INFO}/WHEEL": f"Root-Is-Purelib: false\nTag: py3-none-{HERE.tag}\n".encode(),
    }


def records(files: Contents) -> bytes:
    lines = []
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
        lines.append(f"{name},sha256={digest},{len(content)}")
    return "\n".join([*lines, f"{INFO}/RECORD,,"]).encode()


def wheel_of(folder: Path, files: Contents, tag: str = HERE.tag) -> Path:
    path = folder / f"tq_onnx-{__version__}-py3-none-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in {f"{INFO}/RECORD": records(files), **files}.items():
            archive.writestr(name, content)
    return path


def found(folder: Path, files: Contents) -> list[str]:
    """The problems, but for symbols that the C library of this machine is newer with."""
    problems = checking.problems(wheel_of(folder, files), HERE)
    return [problem for problem in problems if "newer than" not in problem]


def test_a_wheel_of_this_machine_is_sound(tmp_path: Path) -> None:
    assert found(tmp_path, contents()) == []
    assert checking.platform_of_wheel(wheel_of(tmp_path, contents())) == HERE


def _has_two(files: Contents) -> None:
    files["tq_onnx/lib/other.dll"] = b"MZ"


def _has_none(files: Contents) -> None:
    del files[LIBRARY]


def _is_for_another(files: Contents) -> None:
    files[LIBRARY] = made_library(next(name for name in PLATFORMS if name != HERE.name))


def _has_another_layout(files: Contents) -> None:
    files[LIBRARY] = files[LIBRARY].replace(checking.layout_digest().encode(), b"0" * 16)


def _has_another_tag(files: Contents) -> None:
    files[f"{INFO}/WHEEL"] = b"Root-Is-Purelib: true\nTag: py3-none-linux_x86_64\n"


def _lacks_the_model(files: Contents) -> None:
    del files["tq_onnx/bundled/model.safetensors"]


def _has_other_records(files: Contents) -> None:
    files[f"{INFO}/RECORD"] = records({**files, LIBRARY: b"", "tq_onnx/gone.py": b""})


@pytest.mark.parametrize(
    ("damage", "messages"),
    [
        (_has_two, ["has the compiled files"]),
        (_has_none, ["has the compiled files"]),
        (_is_for_another, ["the library is for"]),
        (_has_another_layout, ["another row layout"]),
        (_has_another_tag, ["has the tags", "package of Python alone"]),
        (_lacks_the_model, ["lacks tq_onnx/bundled"]),
        (_has_other_records, ["differ from its files", "another digest of"]),
    ],
)
def test_what_is_wrong_with_a_wheel_is_told(
    tmp_path: Path, damage: Callable[[Contents], None], messages: list[str]
) -> None:
    files = contents()
    damage(files)
    problems = found(tmp_path, files)
    assert len(problems) == len(messages), problems
    assert all(text in problem for text, problem in zip(messages, problems, strict=True))


def test_the_name_of_a_wheel_is_that_of_its_platform(tmp_path: Path) -> None:
    path = wheel_of(tmp_path, contents(), "linux_x86_64")
    assert any(problem.startswith("is called") for problem in checking.problems(path, HERE))


def test_what_a_library_exports_and_needs_is_told(tmp_path: Path) -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("edits an ELF file")

    def edited(edit: Callable[[Any], object]) -> list[str]:
        library = lief.parse(get_library_path().read_bytes())
        edit(library)
        path = tmp_path / "edited.so"
        library.write(str(path))
        problems = checking.library_problems(path.read_bytes(), HERE)
        return [problem for problem in problems if "newer than" not in problem]

    assert edited(lambda library: None) == []
    assert "_Znwm" in edited(lambda library: library.add_exported_function(0x1000, "_Znwm"))[0]
    assert "libgomp.so.1" in edited(lambda library: library.add_library("libgomp.so.1"))[0]
    content = get_library_path().read_bytes()
    old = checking.library_problems(content, replace(HERE, tag="manylinux_2_1_any"))
    assert any("newer than manylinux_2_1_any" in problem for problem in old)
    assert checking.library_problems(b"nothing", HERE) == ["the library cannot be read"]


def test_every_platform_is_built() -> None:
    assert list(building.TARGETS) == list(PLATFORMS)
    assert checking.exported_names() == {
        "CreateEpFactories",
        "RegisterCustomOps",
        "ReleaseEpFactory",
        "tq_layout_digest",
        "tq_library_info",
    }


def test_environments_are_those_of_the_interpreters(tmp_path: Path) -> None:
    here = (sys.version_info[0], sys.version_info[1])
    assert trying.find_pythons([Path(sys.executable)]) == {here: Path(sys.executable)}
    with pytest.raises(building.ReleaseError, match="is no Python"):
        trying.find_pythons([Path("/bin/false")])
    one = tmp_path / "python"
    names = [case.name for case in trying.cases({(3, 13): one, (3, 11): one})]
    assert names == [
        "Python 3.11, newest",
        "Python 3.11, numpy==1.26.*, onnxruntime==1.24.*",
        "Python 3.13, newest",
    ]


def test_a_step_that_fails_says_why() -> None:
    with pytest.raises(building.ReleaseError, match=r"exit status 3\nsaid"):
        building.run([sys.executable, "-c", "print('said'); raise SystemExit(3)"])


# Says what the C++ tests say, of one case for each file in its folder.
PROGRAM = """#!{python}
import sys
from pathlib import Path
cases = Path(__file__).parent / "cases"
if sys.argv[1] == "--list":
    print(*(one.name for one in cases.iterdir()), sep="\\n")
    raise SystemExit
print("levels: fast scalar")
exec((cases / sys.argv[1]).read_text())
print("1 cases, 3 checks, 0 failures")
"""


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("pass", ""),
        (
            "print('x.cpp:1: a == b does not hold: 3'); sys.exit(1)",
            r"last: exit status 1\nx\.cpp:1",
        ),
        ("sys.exit(0)", "last: exit status 0"),
        ("print('rows: 1123456789abcdef at fast')", "digests .'0123456789abcdef', '112345678"),
    ],
)
def test_cases_run_alone_and_what_fails_is_told(tmp_path: Path, case: str, message: str) -> None:
    program = tmp_path / "tests"
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(0o755)
    cases = tmp_path / "cases"
    cases.mkdir()
    (cases / "first").write_text("print('rows: 0123456789abcdef at fast')")
    (cases / "last").write_text(case)
    if not message:
        said = "2 cases, 6 checks, 0 failures; levels fast scalar; rows 0123456789abcdef"
        assert emulating.run_tests(program, HERE.name) == said
        return
    with pytest.raises(building.ReleaseError, match=message):
        emulating.run_tests(program, HERE.name)
