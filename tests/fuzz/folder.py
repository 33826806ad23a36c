"""The lane of model folders: ``genai_config.json``, other JSON, names and links."""

from __future__ import annotations

import json
import random
import shutil
from functools import cache
from pathlib import Path
from typing import Final

from tests.fuzz import json_edits
from tests.fuzz.commands import Case
from tests.fuzz.external import exported
from tests.integrations.genai_folder import genai_config
from tq_onnx.integrations.bundled import bundled_directory
from tq_onnx.integrations.genai import CONFIG_FILE
from tq_onnx.integrations.huggingface import TOKENIZER_FILE

EXPORT: Final = "genai-dml-fp16"
OTHERS: Final = ("config.json", "generation_config.json", "tokenizer.json", "x.json")
NAMES: Final = (
    "x.onnx",
    "model.onnx.data",
    "weights.safetensors",
    ".git",
    "onnx",
    "a\nb",
    "x.lock",
)
OUTPUT: Final = "out"
CODES: Final = (0, 2, 3, 4)


def check(draw: random.Random, folder: Path) -> Case:
    """Changes a folder, inspects and converts it, and generates with it."""
    case = Case(folder)
    given = folder / "given"
    case.what = _make(given, draw)
    before = case.files
    looked = case.run("inspect", given, "--json", codes=CODES)
    output = folder / OUTPUT / "converted"
    done = case.run("convert", given, "-o", output, codes=CODES)
    case.written(output, done, before)
    offered = looked.code == 0 and looked.document.get("convertible", False)
    if offered != (done.code == 0):
        case.broken(
            "disagreement", f"inspect says {looked.code}, convert {done.code} ({done.err.strip()})"
        )
    if draw.randrange(8) == 0:
        more = ("--prompt", "1", "--max-new-tokens", 1, "--threads", 1)
        case.run("generate", given, *more, codes=CODES)
    return case


def warm() -> None:
    """Makes what all cases share."""
    exported(EXPORT)
    configuration()


@cache
def configuration() -> str:
    """A sound genai_config.json."""
    sizes = {"layers": 2, "heads": 4, "kv_heads": 2, "head_size": 16, "vocabulary": 61}
    return json.dumps(genai_config(**sizes))


def _make(folder: Path, draw: random.Random) -> str:
    """Makes a folder; tells what is odd in it."""
    (folder / "sub").mkdir(parents=True)
    for name, content in exported(EXPORT).items():
        (folder / name).write_bytes(content)
    odd = []
    if draw.random() < 0.9:
        (folder / CONFIG_FILE).write_bytes(json_edits.edited(configuration(), draw))
        odd.append(CONFIG_FILE)
    if draw.random() < 0.5:
        shutil.copyfile(bundled_directory() / TOKENIZER_FILE, folder / TOKENIZER_FILE)
    for name in OTHERS:
        if draw.random() < 0.2:
            (folder / name).write_bytes(json_edits.edited('{"a": [1, {"b": "c"}]}', draw))
            odd.append(name)
    if draw.random() < 0.3:
        odd.append(_entry(folder / draw.choice(NAMES), draw))
    return ", ".join(odd)


def _entry(path: Path, draw: random.Random) -> str:
    """Puts something odd into a folder."""
    if path.is_file():
        path.unlink()
    kind = draw.randrange(6)
    if kind == 0:
        path.mkdir()
        return f"folder {path.name!r}"
    if kind == 1:
        targets = ("model.onnx", "sub", "..", "/etc/passwd", "nowhere", path.name, "/dev/null")
        target = draw.choice(targets)
        path.symlink_to(target)
        return f"link {path.name!r} to {target}"
    if kind == 2:
        shutil.copyfile(path.parent / "model.onnx", path)
        return f"model {path.name!r}"
    path.write_bytes(draw.choice((b"", b"x", b"{}", bytes(100))))
    return f"file {path.name!r}"
