"""Tokens for the commands: the tokenizer beside a model, and text files as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tq_onnx.errors import ModelFileError, UsageError
from tq_onnx.integrations.huggingface import TOKENIZER_FILE, Tokenizer, load_tokenizer

# A text is read no further than this many characters for each token that is wanted.
_CHARACTERS_PER_TOKEN = 16

NO_LANGUAGE = "pseudo-random ids, no language: a weak test; use --text and --tokenizer"


def find_tokenizer(directory: Path | None, *models: Path) -> Tokenizer | None:
    """The tokenizer of a folder that was named, or the one beside the first model that has one.

    Models in a folder ``onnx``, as Hugging Face repositories have it, find theirs one folder up.

    Raises:
        ModelFileError: the folder that was named has none.
    """
    if directory is not None:
        return load_tokenizer(directory)
    for model in models:
        above = [model.parent.parent] if model.parent.name == "onnx" else []
        for folder in (model.parent, *above):
            if (folder / TOKENIZER_FILE).is_file():
                return load_tokenizer(folder)
    return None


def require_tokenizer(directory: Path | None, model: Path) -> Tokenizer:
    """As ``find_tokenizer``, for commands that cannot do without.

    Raises:
        ModelFileError: there is none.
    """
    tokenizer = find_tokenizer(directory, model)
    if tokenizer is None:
        raise ModelFileError(
            f"there is no {TOKENIZER_FILE} beside the model",
            where=str(model),
            fix="name the folder that has it with --tokenizer",
        )
    return tokenizer


def file_tokens(path: Path, tokenizer: Tokenizer, count: int) -> list[int]:
    """The first ``count`` tokens of a UTF-8 text file.

    Raises:
        ModelFileError: the file cannot be read as text.
    """
    if not path.exists():
        raise ModelFileError("there is no such file", where=str(path), fix="check the path")
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(count * _CHARACTERS_PER_TOKEN)
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFileError(
            "it cannot be read as UTF-8 text", where=str(path), fix="check the file"
        ) from error
    return tokenizer.encode(text)[:count]


def model_tokens(
    models: Sequence[Path], text: Path | None, count: int, directory: Path | None
) -> tuple[list[int] | int, str]:
    """What models that are compared read: of a file, or else of the bundled model's own text.

    Args:
        models: files, beside one of which the tokenizer may be.
        text: the file.
        count: tokens to read.
        directory: the folder of the tokenizer.

    Returns:
        Token ids, or how many to make up where there is no tokenizer, and where they come from.

    Raises:
        UsageError: there is a text and no tokenizer.
        ModelFileError: the text or the tokenizer cannot be read.
    """
    from tq_onnx.integrations.bundled import heldout_text

    found = find_tokenizer(directory, *models)
    if found is None:
        if text is not None:
            raise UsageError(
                "a text needs a tokenizer, and there is none beside the model",
                where=str(text),
                fix="name the folder that has it with --tokenizer",
            )
        return count, NO_LANGUAGE
    if text is not None:
        return file_tokens(text, found, count), str(text)
    return found.encode(heldout_text())[:count], "the held-out text of the bundled model"
