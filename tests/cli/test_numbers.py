"""Numbers on the command line: every option refuses what is no value of it, with its name."""

from __future__ import annotations

import click
import pytest

from tests.cli.run import run
from tq_onnx.cli import flags
from tq_onnx.cli.main import COMMANDS, main

HOSTILE = ("-1", "1.5e", "1e400", "nan", "inf", str(2**70), "9" * 5000, "1_0x", "")


def numbers() -> list[tuple[str, str]]:
    """Every option that takes a number: its command and its name."""
    context = click.Context(main)
    found = []
    for name in COMMANDS:
        command = main.get_command(context, name)
        assert command is not None
        for option in command.params:
            if isinstance(option.type, click.types.IntParamType | click.types.FloatParamType):
                assert isinstance(option.type, flags.Whole | flags.Real), (name, option.opts)
                found.append((name, option.opts[0]))
    return found


@pytest.mark.parametrize(("command", "option"), numbers(), ids=str)
def test_what_is_no_number_is_refused_by_the_name_of_the_option(command: str, option: str) -> None:
    arguments = ("model.onnx", "model.int4.onnx") if command in ("report", "verify") else ("m",)
    for text in HOSTILE:
        sentence = run(command, *arguments, option, text).sentence(2)
        assert f"'{option}'" in sentence, text
        assert "is not a " in sentence, text
        assert len(sentence) < 200, text


def test_a_seed_has_32_bits() -> None:
    sentence = run("convert", "model.onnx", "--seed", 2**32).sentence(2)
    assert "'4294967296' is not a whole number from 0 to 4294967295" in sentence
