"""The public API: every name, its documentation, its types, and that nothing shadows it."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import onnxruntime
import pytest

import tq_onnx
from tests.integrations.genai_folder import genai_folder
from tests.runtime.models import DYNAMO, original
from tq_onnx.cli.main import COMMANDS
from tq_onnx.conversion.options import Options
from tq_onnx.errors import TqOnnxError
from tq_onnx.integrations.bundled import bundled_directory
from tq_onnx.integrations.folderconversion import FolderReport
from tq_onnx.integrations.folderinspection import FolderInspection
from tq_onnx.runtime.library import get_library_path
from tq_onnx.targets.registry import TARGETS

ROOT = Path(__file__).resolve().parents[1]
FUNCTIONS = sorted(
    name for name in tq_onnx.__all__ if isinstance(getattr(tq_onnx, name), FunctionType)
)
TAKE_THREADS = [
    name for name in FUNCTIONS if "threads" in inspect.signature(getattr(tq_onnx, name)).parameters
]
IDS = [int(number) for number in np.random.default_rng(3).integers(0, 40, 48)]
OLIVE = "tq_onnx.integrations.olive"
"""A class of Olive, which alone imports it; tests/exports has its test."""
QUICK: dict[str, Any] = {"library": False, "threads": 1}


@pytest.fixture(scope="module", autouse=True)
def _everything_imported() -> None:
    """After every submodule was imported, names must still be what they are."""
    for module in pkgutil.walk_packages(tq_onnx.__path__, "tq_onnx."):
        if module.name != OLIVE:
            importlib.import_module(module.name)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    shutil.copyfile(bundled_directory() / "tokenizer.json", tmp_path / "tokenizer.json")
    return Path(shutil.copyfile(original(DYNAMO), tmp_path / "model.onnx"))


def python(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_names() -> None:
    assert [
        *("adopt", "bench", "calibrate", "convert", "diff", "fit", "get_library_path", "inspect"),
        *("library_path", "load", "register", "report", "session_options", "verify"),
    ] == FUNCTIONS
    assert set(tq_onnx.__all__) - set(FUNCTIONS) == {
        "PRESETS",
        *(
            "Cache",
            "Chat",
            "Completion",
            "Engine",
            "Guidance",
            "LanguageModel",
            "Piece",
            "PromptStore",
            "Sampling",
        ),
        "Progress",
        "__version__",
        "errors",
    }
    assert set(tq_onnx.__all__) <= set(dir(tq_onnx))
    assert tq_onnx.errors is importlib.import_module("tq_onnx.errors")
    with pytest.raises(AttributeError, match="no attribute 'bogus'"):
        _ = tq_onnx.bogus  # type: ignore[attr-defined]


def test_no_module_has_the_name_of_a_function() -> None:
    names = {module.name for module in pkgutil.iter_modules(tq_onnx.__path__)}
    assert not names & set(FUNCTIONS)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_documentation(name: str) -> None:
    function = getattr(tq_onnx, name)
    text = inspect.getdoc(function)
    assert text is not None
    first = text.splitlines()[0]
    assert first.endswith(".")
    assert re.match(r"[A-Z][a-z]*[a-rt-z] ", first), f"{first!r} does not begin with a verb"
    parameters = [
        ("**" if parameter.kind is parameter.VAR_KEYWORD else "") + parameter.name
        for parameter in inspect.signature(function).parameters.values()
    ]
    section = text.partition("Args:\n")[2].partition("\n\n")[0]
    assert re.findall(r"^    (\*{0,2}\w+): ", section, re.M) == parameters
    assert "\nRaises:\n" in text
    assert ("\nReturns:\n" in text) == (function.__annotations__["return"] != "None")


def test_options_are_keyword_arguments() -> None:
    parameters = inspect.signature(tq_onnx.convert).parameters
    of_targets = {"equal_rows", "spare_rows", "planes", "gains", "feedback"}
    for field in dataclasses.fields(Options):
        assert (field.name in parameters) != (field.name in of_targets)
        if field.name in of_targets:
            continue
        default = parameters[field.name].default
        assert default in (None, field.default)


def test_an_import_loads_nothing_heavy() -> None:
    code = (
        "import sys, json, tq_onnx\n"
        "loaded = sorted({name.split('.')[0] for name in sys.modules})\n"
        "tq_onnx.PRESETS, tq_onnx.errors, tq_onnx.Progress, dir(tq_onnx)\n"
        "later = sorted({name.split('.')[0] for name in sys.modules})\n"
        "print(json.dumps([loaded, later]))\n"
    )
    heavy = {
        "onnx",
        "onnx_ir",
        "onnxscript",
        "onnxruntime",
        "click",
        "rich",
        "safetensors",
    }
    at_once, later = json.loads(python(code))
    assert not (heavy | {"numpy"}) & set(at_once)
    assert not heavy & set(later)


def test_a_conversion_needs_no_onnxruntime(model: Path) -> None:
    code = (
        f"import sys, tq_onnx\ntq_onnx.inspect({str(model)!r})\ntq_onnx.convert({str(model)!r})\n"
        "assert not {'onnxruntime', 'click', 'rich'} & set(sys.modules)\n"
    )
    python(code)
    assert (model.parent / "model.int4.onnx").is_file()


def test_every_function(model: Path) -> None:
    """With paths as text; as ``Path`` they are what the commands give."""
    said: list[tq_onnx.Progress] = []
    done = tq_onnx.convert(str(model), preset="int3", seed=7, on_progress=said.append)
    assert not isinstance(done, FolderReport)
    assert done.output == model.with_name("model.int3.onnx")
    assert (done.plan.preset, done.plan.seed) == ("int3", 7)
    assert said[0].doing == "Reading the graph"
    converted = str(done.output)
    found = tq_onnx.inspect(converted)
    assert not isinstance(found, FolderInspection)
    assert found.plan == done.plan
    checked = tq_onnx.verify(str(model), converted, tokens=IDS, context=32, new_tokens=2, **QUICK)
    assert checked.holds
    assert checked.source == "token ids of the caller"
    compared = tq_onnx.report(
        str(model),
        converted,
        tokens=IDS,
        context=24,
        **QUICK,
    )
    assert [entry.preset for entry in compared.models] == ["int3"]
    timed = tq_onnx.bench(str(model), converted, contexts=[16], tokens=2, **QUICK)
    assert [row.context for row in timed.rows] == [16]
    opened = tq_onnx.load(Path(converted), threads=1)
    assert opened.plan == done.plan
    assert opened.decoder().prefill([IDS[:4]]).shape[:2] == (1, 4)
    options = onnxruntime.SessionOptions()
    tq_onnx.register(options)
    onnxruntime.InferenceSession(converted, options, providers=["CPUExecutionProvider"])
    assert tq_onnx.get_library_path() == tq_onnx.library_path() == str(get_library_path())


def test_a_text_and_a_calibration(tmp_path: Path) -> None:
    from tq_onnx.integrations.bundled import build_bundled, heldout_text

    model = build_bundled("dynamo", tmp_path / "m")
    text = tmp_path / "text.txt"
    text.write_text(heldout_text()[:2000])
    done = tq_onnx.calibrate(str(model), str(text), tokens=128, context=64, skip=10, **QUICK)
    assert done.output == model.with_name("model.calibration.safetensors")
    assert (done.tokens, done.context, done.bytes) == (128, 64, done.output.stat().st_size)
    converted = tq_onnx.convert(model, calibration=str(done.output), center_from=2)
    checked = tq_onnx.verify(
        model, converted.output, text=text, tokens=64, new_tokens=2, context=64, threads=1
    )
    assert checked.holds
    assert checked.source == str(text)
    again = tq_onnx.convert(model, tmp_path / "again.onnx", calibrate=True, center_from=2)
    assert again.output.read_bytes() == converted.output.read_bytes()
    with pytest.raises(tq_onnx.errors.UsageError, match="name two files"):
        tq_onnx.convert(model, calibrate=True, calibration=done.output)


def test_folders(tmp_path: Path) -> None:
    source = genai_folder(tmp_path / "in")
    found = tq_onnx.inspect(str(source))
    assert isinstance(found, FolderInspection)
    assert found.convertible
    assert found.genai
    done = tq_onnx.convert(str(source), preset="int3")
    assert isinstance(done, FolderReport)
    assert done.output == tmp_path / "in-int3"
    assert [decoder.plan.preset for decoder in done.decoders] == ["int3"]
    assert done.ratio == done.decoders[0].ratio > 1
    assert tq_onnx.load(done.output, threads=1).plan == done.decoders[0].plan


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "preset": ("convert", {"preset": "bogus"}, "preset 'bogus' is not one of"),
    "target": ("convert", {"target": "bogus"}, "target 'bogus' is not one of cpu"),
    "an option of no target": ("convert", {"bogus": 3}, "no target has the option bogus"),
    "an option of another target": ("convert", {"max_positions": 3}, 'only a model for `target="'),
    "an option out of range": ("convert", {"target": "cann", "max_positions": 0}, "from 1 to"),
    "a long seed": ("convert", {"seed": 2**63}, "seed must be at most 4294967295, got 9223"),
    "a negative seed": ("convert", {"seed": -1}, "seed must be at least 0, got -1"),
    "half a token": (
        "convert",
        {"residual_length": 1.5},
        "residual_length must be a whole number, got 1.5",
    ),
    "sinks": ("convert", {"sink_tokens": -0.5}, "sink_tokens must be a whole number, got -0.5"),
    "a truth for bits": ("convert", {"bits_k": True}, "bits_k must be a whole number, got True"),
    "bits": ("convert", {"bits_v": 2**70}, "bits_v must be at most 8, got 11805"),
    "edges": ("convert", {"boundary_layers": -1}, "boundary_layers must be at least 0"),
    "long pages": ("convert", {"target": "paged", "block_size": 2**70}, "block_size must be a"),
    "data": ("convert", {"external_data": "move"}, "not keep, copy or link"),
    "center_from": (
        "convert",
        {"center_from": 3},
        "give `calibration`, or leave `center_from` out",
    ),
    "ep": ("load", {"ep": "bogus"}, "execution provider 'bogus' is not one of cpu"),
    "threads": ("load", {"threads": 0}, "threads must be at least 1, got 0"),
    "contexts": ("bench", {"contexts": [0]}, r"contexts\[0\] must be at least 1"),
    "new_tokens": ("verify", {"converted": "a", "new_tokens": 0}, "new_tokens must be at least 1"),
    "text and ids": ("verify", {"converted": "a", "text": "a", "tokens": [1]}, "leave one of them"),
    "nothing to compare": ("report", {"converted": []}, "there is no converted model"),
    "half of a step": ("bench", {"tokens": 1.5}, "tokens must be a whole number, got 1.5"),
    "a negative prompt": ("bench", {"prompt_limit": -1}, "prompt_limit must be at least 0"),
    "no tokens": ("report", {"converted": "a", "tokens": -5}, "tokens must be at least 1, got -5"),
    "tokens": ("verify", {"converted": "a", "tokens": 1.5}, "tokens must be a whole number"),
    "a negative skip": ("calibrate", {"skip": -1}, "skip must be at least 0"),
    "sequences": ("fit", {"sequences": 2**70}, "sequences must be at most 2147483647"),
    "memory": ("fit", {"memory": float("nan")}, "memory must be a whole number, got nan"),
    "stride": ("report", {"converted": "a", "stride": 0}, "stride must be at least 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(model: Path, case: str) -> None:
    name, arguments, sentence = REFUSED[case]
    with pytest.raises(tq_onnx.errors.UsageError, match=sentence) as caught:
        getattr(tq_onnx, name)(model, **arguments)
    assert isinstance(caught.value, TqOnnxError)


@pytest.mark.parametrize("name", TAKE_THREADS)
def test_more_threads_than_a_machine_starts_are_refused(model: Path, name: str) -> None:
    function = getattr(tq_onnx, name)
    models = [model] * (2 if "converted" in inspect.signature(function).parameters else 1)
    for count in (10**5, 2**40):
        with pytest.raises(tq_onnx.errors.UsageError, match="threads must be at most 1024, got 1"):
            function(*models, threads=count)


USER_FILE = """
from pathlib import Path

import tq_onnx
from tq_onnx import Progress, convert, errors


def show(progress: Progress) -> None:
    print(progress.doing, progress.done, progress.total)


def work(path: Path) -> list[str]:
    try:
        done = convert(path, preset="int3", layers="0-2", on_progress=show)
        tq_onnx.convert(str(path), "out.onnx", target="cann", max_positions=64)
    except errors.UnsupportedModelError as error:
        return [error.what]
    written: Path = done.output
    ratio: float = done.ratio
    found = tq_onnx.inspect(path)
    names = [type(found).__name__, tq_onnx.__version__, *tq_onnx.PRESETS]
    checked = tq_onnx.verify(path, written, text="book.txt", on_progress=show)
    holds: bool = checked.holds
    compared = tq_onnx.report(path, [written], picture="cost.svg")
    perplexity: float = compared.perplexity
    timed = tq_onnx.bench(path, contexts=(16, 32))
    speedup: float = timed.rows[0].speedup
    statistics = tq_onnx.calibrate(path, "book.txt", overwrite=True)
    tokens: int = statistics.tokens
    model = tq_onnx.load(written, threads=2)
    vocabulary: int = model.vocabulary
    tq_onnx.register(object())
    library: str = tq_onnx.library_path() + tq_onnx.get_library_path()
    return [*names, library, str((ratio, holds, perplexity, speedup, tokens, vocabulary))]
"""


def test_types_reach_users(tmp_path: Path) -> None:
    user = tmp_path / "user.py"

    def check(text: str) -> str:
        user.write_text(text)
        done = subprocess.run(
            [sys.executable, "-m", "mypy", "--strict", "--config-file", "pyproject.toml", user],
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
            cwd=ROOT,
            env={**os.environ, "MYPYPATH": str(ROOT)},
        )
        return done.stdout + done.stderr

    assert "Success" in check(USER_FILE)
    wrong = check(USER_FILE.replace("holds: bool", "holds: str").replace('"0-2"', "2"))
    assert wrong.count("error:") == 2
    assert (ROOT / "tq_onnx" / "py.typed").is_file()


def test_commands_and_functions_have_the_same_options() -> None:
    of_targets = {option.name for row in TARGETS.values() for option in row.options}
    own_ways = {"convert": {"target_options"}}
    for name in set(COMMANDS) & set(FUNCTIONS):
        command = getattr(importlib.import_module(f"tq_onnx.cli.{name}"), name)
        asked = {parameter.name for parameter in command.params}
        asked -= {"as_json", "show_all", "help_all"}  # how a command prints
        asked -= {"layers"} if name == "report" else set()
        asked -= {"paged"}  # a target by another name
        if name in ("convert", "fit", "inspect"):
            asked = asked - {"model"} | {"path"}
        parameters = set(inspect.signature(getattr(tq_onnx, name)).parameters)
        assert asked - parameters - of_targets == set()
        reported = set() if name in ("adopt", "diff") else {"on_progress"}
        assert parameters - asked == reported | own_ways.get(name, set())
