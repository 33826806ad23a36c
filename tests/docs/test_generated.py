"""Generated blocks that are not current are seen, and their sources are complete."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
import types
from pathlib import Path

import click
import pytest

from tq_onnx.cli.main import COMMANDS, main
from tq_onnx.runtime.variables import OPERATORS, PACKAGE, VARIABLES

ROOT = Path(__file__).parents[2]
CPP = ("core", "ort", "cann/host")
VARIABLE = re.compile(r'"((?:TQ_ONNX|ASCEND)_[A-Z_]+)"')


@pytest.fixture(scope="module")
def generate() -> types.ModuleType:
    sys.path.insert(0, str(ROOT / "docs"))  # as for `python docs/generate.py`
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.remove(str(ROOT / "docs"))
    return module


def test_check_sees_a_difference_and_writing_mends_it(
    generate: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "README.md"
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    (tmp_path / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    page.write_text((ROOT / "README.md").read_text().replace("| `int4` (default) |", "| other |"))
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    assert generate.run(["--check"]) == 1
    assert generate.run([]) == 0
    assert page.read_text() == (ROOT / "README.md").read_text()
    assert generate.run(["--check"]) == 0


@pytest.mark.parametrize(
    "text",
    [
        "<!-- generated: presets -->\n",
        "<!-- end generated -->\n",
        "<!-- generated: no-such-block -->\n<!-- end generated -->\n",
        "<!-- generated: operator NoSuchOperator -->\n<!-- end generated -->\n",
        "<!-- generated: help no-such-command -->\n<!-- end generated -->\n",
    ],
)
def test_a_broken_marker_is_an_error(generate: types.ModuleType, text: str) -> None:
    with pytest.raises(ValueError, match=r"marker|no block|no command|no operator"):
        generate.render(text)


@pytest.mark.parametrize(
    ("page", "before", "after", "sentence"),
    [
        ("commands.md", "## tq-onnx fit\n", "", "there is no `## tq-onnx fit`"),
        (
            "commands.md",
            "generated: help fit ",
            "generated: help info ",
            "over the block `help fit`",
        ),
        ("operators.md", "operator TurboQuantEncode ", "presets ", "operator TurboQuantEncode"),
        ("ascend.md", "<!-- generated: cann-features", "<!-- generated: presets", "cann-features"),
    ],
)
def test_a_missing_heading_or_block_is_refused(
    generate: types.ModuleType, page: str, before: str, after: str, sentence: str
) -> None:
    texts = {path.name: path.read_text() for path in generate.documents()}
    assert before in texts[page]
    texts[page] = texts[page].replace(before, after)
    assert sentence in next(generate.missing("".join(texts.values())))


def test_commands_are_in_one_order(
    generate: types.ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generate, "COMMANDS", dict(reversed(COMMANDS.items())))
    assert generate.run(["--check"]) == 1
    assert "the order has to be info, serve" in capsys.readouterr().out


def test_every_command_with_json_has_a_schema(generate: types.ModuleType) -> None:
    context = click.Context(main)
    options = {
        name: [option for one in command.params for option in one.opts]
        for name in COMMANDS
        if (command := main.get_command(context, name)) is not None
    }
    with_json = {name for name, found in options.items() if "--json" in found}
    assert set(generate.schemas.DOCUMENTS) == with_json
    assert {path.name for path in (ROOT / "docs" / "schemas").iterdir()} == {
        f"{name}.json" for name in with_json
    }


def test_every_option_is_documented() -> None:
    page = (ROOT / "docs" / "commands.md").read_text()
    sections = dict(re.findall(r"^## tq-onnx ([\w-]+)\n(.*?)(?=^## |\Z)", page, re.S | re.M))
    context = click.Context(main)
    for name in COMMANDS:
        command = main.get_command(context, name)
        assert command is not None
        for one in command.params:
            for option in (*one.opts, *one.secondary_opts) if isinstance(one, click.Option) else ():
                assert re.search(rf"(?<![\w-]){option}(?![\w-])", sections[name]), (name, option)


def test_every_environment_variable_is_documented() -> None:
    """Those of tests and scripts, too."""
    folders = [ROOT / name for name in (".ci", "tq_onnx", "custom_ops", "tests", "models")]
    files = [path for folder in (*folders, ROOT / "docs") for path in folder.rglob("*")]
    files += [*ROOT.glob("*.md"), *(ROOT / "benchmarks").rglob("*")]
    pages = "".join(path.read_text(encoding="utf-8") for path in files if path.suffix == ".md")
    sources = [
        path
        for path in files
        if path.suffix in (".py", ".cpp", ".h", ".sh")
        or (path.parent.name == ".ci" and path.is_file())
    ]
    read = r'(?:getenv\(|environ(?:\.get)?[(\[]|environment_number\()"(\w+)"|\$\{?(TQ_[A-Z_]+)'
    names = {
        one or other
        for path in sources
        for one, other in re.findall(read, path.read_text(encoding="utf-8"))
    }
    mine = {name for name in names if name.startswith("TQ_")}
    assert {"TQ_FUZZ_SECONDS", "TQ_CANN_ENV", "TQ_FAKE_ACL_SEED"} <= mine
    assert {name for name in mine if f"`{name}" not in pages} == set()


def test_every_environment_variable_is_declared() -> None:
    python = "".join(
        path.read_text() for path in (ROOT / "tq_onnx").rglob("*.py") if path.name != "variables.py"
    )
    assert VARIABLE.findall(python) == [], "declare it in tq_onnx/runtime/variables.py"
    native = "".join(
        path.read_text()
        for folder in CPP
        for path in (ROOT / "custom_ops" / folder).rglob("*")
        if path.suffix in (".h", ".cpp")
    )
    declared = {one.name for one in VARIABLES if OPERATORS in one.readers}
    assert set(VARIABLE.findall(native)) == declared
    assert {reader for one in VARIABLES for reader in one.readers} == {PACKAGE, OPERATORS}
