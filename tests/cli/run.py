"""Runs the command line inside this process."""

from __future__ import annotations

import io
import json
import re
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tq_onnx.cli.main import main

#: What ``verify`` says at its beginning on a machine that takes long for it.
DURATION = re.compile(r"^this takes about .*\n", re.M)
SCHEMAS = Path(__file__).parents[2] / "docs" / "schemas"


@cache
def schema(command: str) -> Any:
    return json.loads((SCHEMAS / f"{command}.json").read_text())


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str
    command: str = ""
    duration: str = ""

    @property
    def document(self) -> Any:
        """stdout as the one JSON document that it must be, by the schema of the command."""
        import jsonschema

        found = json.loads(self.out)
        jsonschema.Draft202012Validator(schema(self.command)).validate(found)
        return found

    def sentence(self, code: int) -> str:
        """The one line on stderr of a command that failed, as it must."""
        assert self.code == code, (self.code, self.out, self.err)
        assert self.err.startswith("error: ")
        assert self.err.count("\n") == 1
        assert self.err.endswith("\n")
        assert "Traceback" not in self.err
        return self.err.removeprefix("error: ").strip()


def run(*arguments: object) -> Outcome:
    """Runs ``tq-onnx ARGUMENTS``."""
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main.main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
    errors = err.getvalue()
    return Outcome(
        code,
        out.getvalue(),
        DURATION.sub("", errors),
        str(next(iter(arguments), "")),
        "".join(DURATION.findall(errors)),
    )
