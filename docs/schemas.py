"""Derive the JSON schemas of ``--json`` from the records that the commands print.

``tq_onnx.cli.terminal.print_json`` prints a dataclass as an object of its fields, a path as a
string, and NaN and infinities as null, because JSON has none: so a number that need not be whole
may be null. Descriptions are those of the docstrings.
"""

from __future__ import annotations

import json
import re
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from tq_onnx.api.calibrating import CalibrationReport
from tq_onnx.api.demonstrating import DemoReport
from tq_onnx.cli.generate import GenerateDocument
from tq_onnx.cli.verify import VerifyDocument
from tq_onnx.codec.presetfacts import PresetFacts
from tq_onnx.conversion.reports import ConversionReport, InspectionReport
from tq_onnx.integrations.adoption import AdoptionReport
from tq_onnx.integrations.folderconversion import FolderReport
from tq_onnx.integrations.folderinspection import FolderInspection
from tq_onnx.measure.greedy import GreedyFigures
from tq_onnx.quality.figures import ComparisonReport
from tq_onnx.runtime.installation import InfoReport
from tq_onnx.speed.bench import SpeedReport
from tq_onnx.speed.fit import FitReport
from tq_onnx.verification.diff import DiffReport
from tq_onnx.verification.findings import VerifyReport

FOLDER: Final = Path(__file__).resolve().parent / "schemas"
DRAFT: Final = "https://json-schema.org/draft/2020-12/schema"

DOCUMENTS: Final[dict[str, Any]] = {
    "convert": ConversionReport | FolderReport,
    "adopt": AdoptionReport,
    "inspect": InspectionReport | FolderInspection,
    "presets": list[PresetFacts],
    "verify": VerifyDocument,
    "diff": DiffReport,
    "report": ComparisonReport,
    "bench": SpeedReport,
    "calibrate": CalibrationReport,
    "fit": FitReport,
    "generate": GenerateDocument,
    "info": InfoReport,
    "demo": DemoReport,
}
"""What a command prints with ``--json``."""
_LATE: Final = {record.__name__: record for record in (GreedyFigures, VerifyReport)}
"""Records that annotations name in modules which import them for the type checker only."""
_PLAIN: Final[dict[Any, Any]] = {
    str: "string",
    Path: "string",
    bool: "boolean",
    int: "integer",
    float: ["number", "null"],
    type(None): "null",
}


def schema(command: str) -> dict[str, Any]:
    """Return the schema of what a command prints with ``--json``.

    Args:
        command: a key of ``DOCUMENTS``.
    """
    records: dict[str, Any] = {}
    content = _schema(DOCUMENTS[command], records)
    return {"$schema": DRAFT, "title": f"tq-onnx {command} --json", **content, "$defs": records}


def files() -> dict[Path, str]:
    """Return the files of all schemas, and their content."""
    return {
        FOLDER / f"{command}.json": json.dumps(schema(command), indent=2) + "\n"
        for command in DOCUMENTS
    }


def _schema(kind: Any, records: dict[str, Any]) -> dict[str, Any]:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in _PLAIN or is_dataclass(kind):
        return {"type": _PLAIN[kind]} if kind in _PLAIN else _reference(kind, records)
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(argument, records) for argument in arguments]}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": _schema(arguments[1], records)}
    if origin is tuple and Ellipsis not in arguments:
        items = [_schema(argument, records) for argument in arguments]
        length = len(items)
        return {"type": "array", "prefixItems": items, "minItems": length, "maxItems": length}
    if origin not in (list, tuple):
        raise TypeError(f"{kind} has no JSON schema")
    return {"type": "array", "items": _schema(arguments[0], records)}


def _reference(record: Any, records: dict[str, Any]) -> dict[str, Any]:
    name = record.__name__
    if name not in records:
        records[name] = {}  # a record may hold records of its own kind
        hints = get_type_hints(record, localns=_LATE)
        meanings = attributes(record)
        names = [field.name for field in fields(record)]
        records[name] = {
            "description": _prose((record.__doc__ or "").split("\n\n", 1)[0]),
            "type": "object",
            "properties": {
                name: {
                    **_schema(hints[name], records),
                    **({"description": meanings[name]} if name in meanings else {}),
                }
                for name in names
            },
            "required": names,
            "additionalProperties": False,
        }
    return {"$ref": f"#/$defs/{name}"}


def attributes(record: type) -> dict[str, str]:
    """Return what the docstrings of a record and of those it extends say of its attributes."""
    meanings = {}
    for extended in reversed(record.__mro__):
        _, _, text = (extended.__doc__ or "").partition("Attributes:\n")
        entries = re.findall(r"^        (\w+): (.*(?:\n {12,}.*)*)", text, re.MULTILINE)
        meanings |= {name: _prose(meaning) for name, meaning in entries}
    return meanings


def _prose(text: str) -> str:
    return " ".join(text.split()).replace("``", "`")
