"""Find the tokenizer beside a model, and read text files as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tq_onnx.codec.gathering import FEWEST_TOKENS
from tq_onnx.errors import ModelFileError, UsageError
from tq_onnx.integrations.huggingface import TOKENIZER_FILE, Tokenizer, load_tokenizer

# A text is read no further than this many characters for each token that is wanted.
_CHARACTERS_PER_TOKEN = 16

OWN_TEXT: Final = "the text that comes with tq-onnx"
"""The source of tokens where no text is named."""

_OWN_TEXT: Final = Path(__file__).with_name("calibration.txt")

NO_LANGUAGE = "pseudo-random ids, no language: a weak test; use `text` and `tokenizer`"


def find_tokenizer(directory: Path | None, *models: Path) -> Tokenizer | None:
    """Find the tokenizer in a folder that was named, or beside the first model that has one.

    Models in a folder ``onnx``, as Hugging Face repositories have it, find theirs one folder up.
    """
    folder = tokenizer_folder(directory, *models)
    return None if folder is None else load_tokenizer(folder)


def tokenizer_folder(directory: Path | None, *models: Path) -> Path | None:
    """Find the folder of a tokenizer as ``find_tokenizer`` does; None if no model has one."""
    if directory is not None:
        return directory
    for model in models:
        above = [model.parent.parent] if model.parent.name == "onnx" else []
        for folder in (model.parent, *above):
            if (folder / TOKENIZER_FILE).is_file():
                return folder
    return None


def require_tokenizer(directory: Path | None, model: Path) -> Tokenizer:
    """Find a tokenizer as ``find_tokenizer`` does, and refuse to go on without one."""
    tokenizer = find_tokenizer(directory, model)
    if tokenizer is None:
        raise missing_tokenizer(model)
    return tokenizer


def expect_tokenizer(model: Path) -> None:
    """Refuse to calibrate a model without a tokenizer where no folder can be named."""
    if tokenizer_folder(None, model) is None:
        fix = "run `tq-onnx calibrate` first, with the folder that has it as `tokenizer`"
        raise missing_tokenizer(model, fix)


def missing_tokenizer(
    model: Path, fix: str = "name the folder that has it with `tokenizer`"
) -> ModelFileError:
    """Return the refusal of a model without a tokenizer, and what to do about it."""
    return ModelFileError(
        f"there is no {TOKENIZER_FILE} beside the model", where=str(model), fix=fix
    )


def file_tokens(path: Path, tokenizer: Tokenizer, count: int) -> list[int]:
    """Return the first ``count`` tokens of a UTF-8 text file."""
    if not path.exists():
        raise ModelFileError("there is no such file", where=str(path), fix="check the path")
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(count * _CHARACTERS_PER_TOKEN)
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFileError(
            "the file cannot be read as UTF-8 text", where=str(path), fix="check the file"
        ) from error
    return tokenizer.encode(text)[:count]


def calibration_text() -> str:
    """Return the text that models are calibrated on by default.

    Prose, dialogue, code in several languages, lists, tables, logs and letters, and paragraphs in
    ten human languages, in turns of about a kilobyte, so that its beginning is a mixture, too. It
    was written for tq-onnx and is under the licence of tq-onnx.
    """
    return _OWN_TEXT.read_text(encoding="utf-8")


def model_tokens(
    models: Sequence[Path],
    text: Path | None,
    tokens: int | Sequence[int],
    directory: Path | None,
) -> tuple[Sequence[int] | int, str]:
    """Choose the tokens that models read that are compared.

    They come from a file, or from the bundled model's own text.

    Returns:
        Token ids, or how many to make up where there is no tokenizer, and where they come from.
    """
    if not isinstance(tokens, int):
        if text is not None:
            raise UsageError("a text and token ids were given", fix="leave one of them out")
        return tokens, "token ids of the caller"
    tokenizer = find_tokenizer(directory, *models)
    if tokenizer is None:
        if text is not None:
            raise UsageError(
                "a text needs a tokenizer, and there is none beside the model",
                where=str(text),
                fix="name the folder that has it with `tokenizer`",
            )
        return tokens, NO_LANGUAGE
    if text is not None:
        return file_tokens(text, tokenizer, tokens), str(text)
    from tq_onnx.integrations.bundled import heldout_text

    return tokenizer.encode(heldout_text())[:tokens], "the held-out text of the bundled model"


def calibration_tokens(
    model: Path, text: Path | None, directory: Path | None, count: int, skip: int
) -> tuple[list[int], list[int]]:
    """Read the tokens of a text that a model is calibrated on.

    Args:
        count: tokens to read.
        skip: tokens at the start of the text to leave out.

    Returns:
        The tokens, and those that every text begins with, and so every window.
    """
    words = require_tokenizer(directory, model)
    empty = words.encode("")
    if text is None:
        ids = words.encode(calibration_text())
    else:
        ids = file_tokens(text, words, max(skip, len(empty)) + count)
    begin = _shared(empty, ids)
    ids = ids[max(skip, len(begin)) :][:count]
    if len(ids) < FEWEST_TOKENS:
        behind = f"behind the first {skip:,} tokens " if skip else ""
        raise UsageError(
            f"{behind}there are {len(ids)} tokens, and statistics need at least {FEWEST_TOKENS}",
            where=OWN_TEXT if text is None else str(text),
            fix="skip fewer, or give a longer text" if skip else "give a longer text",
        )
    return ids, begin


def _shared(first: list[int], second: list[int]) -> list[int]:
    """Return what both begin with."""
    return next(first[:n] for n in range(len(first), -1, -1) if first[:n] == second[:n])
