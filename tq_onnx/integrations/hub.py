"""Repositories of Hugging Face by their names, fetched by ``huggingface_hub``.

Its cache, its token, ``HF_HUB_OFFLINE`` and ``HF_ENDPOINT`` hold here as everywhere: a revision
that is in the cache is not fetched again.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from tq_onnx.errors import ModelFileError, UsageError

_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_OTHER_WEIGHTS: Final = [
    f"*.{suffix}" for suffix in ("safetensors", "bin", "gguf", "pt", "pth", "h5", "msgpack", "ot")
]
_COMPANIONS: Final = ["*.json", "*.txt", "*.model", "*.jinja", "*.md", "LICENSE*"]


def repository_of(path: Path) -> str | None:
    """Return the OWNER/NAME that a path spells; None if it is, or may become, a file here."""
    name = path.as_posix()
    is_name = _NAME.fullmatch(name) and path.suffix != ".onnx"
    return name if is_name and not path.exists() and not path.parent.exists() else None


def fetch(repository: str, revision: str | None = None, include: str | None = None) -> Path:
    """Return the folder of a repository in Hugging Face's cache, after fetching what is missing."""
    if find_spec("huggingface_hub") is None:
        raise UsageError(
            "there is no such file or folder, and to fetch a repository of Hugging Face "
            "huggingface_hub is needed",
            where=repository,
            fix="check the path, or run `pip install huggingface_hub`",
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    where = repository if revision is None else f"{repository}, revision {revision}"
    try:
        folder = snapshot_download(
            repository,
            revision=revision,
            allow_patterns=None if include is None else [f"{include}*", *_COMPANIONS],
            ignore_patterns=_OTHER_WEIGHTS,
        )
    except RevisionNotFoundError as error:
        raise ModelFileError(
            "the repository has no such revision", where=where, fix="check `revision`"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelFileError(
            "there is neither such a folder here nor such a repository at Hugging Face",
            where=where,
            fix="check the name; for a private one, log in with `hf auth login`",
        ) from error
    except LocalEntryNotFoundError as error:
        raise ModelFileError(
            "there is no such folder here, Hugging Face's cache has no copy, and its server does "
            "not answer",
            where=where,
            fix="check the path or the network",
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ModelFileError(
            f"the repository cannot be fetched ({str(error).splitlines()[0]})",
            where=where,
            fix="fetch it with `hf download` into a folder, and give that",
        ) from error
    return Path(folder)
