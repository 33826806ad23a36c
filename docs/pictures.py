"""Draw the pictures of docs/how-it-works.md from the codec, and that of docs/performance.md.

    python docs/pictures.py            write docs/pictures/*.svg

The picture of Netron is made by ``python tests/netron/page.py MODEL docs/pictures/netron.png``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import matplotlib
import measured
import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from tq_onnx.codec.codebook import codebook_of
from tq_onnx.codec.presets import DEFAULT_PRESET, PRESETS
from tq_onnx.codec.rotation import make_rotation
from tq_onnx.codec.spec import row_layout
from tq_onnx.codec.window import window_of

FOLDER: Final = Path(__file__).resolve().parent / "pictures"
HEAD_SIZE: Final = 128
HALF_BYTES: Final = 2
BEFORE, AFTER, LINES = "#b45309", "#0f766e", "0.6"


@contextmanager
def figure(name: str, width: float, height: float) -> Iterator[Figure]:
    """Yield an empty figure and write it afterwards; sizes are in inches.

    The same code gives the same file, and text stays text.
    """
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 9}):
        picture = Figure(figsize=(width, height), layout="constrained")
        yield picture
        metadata: dict[str, Any] = {"Date": None}
        picture.savefig(FOLDER / f"{name}.svg", metadata=metadata, facecolor="white")


def key() -> npt.NDArray[np.float64]:
    """Return a unit vector ``[D]`` with a few large coordinates, as keys of trained models have."""
    rng = np.random.default_rng(5)
    vector = rng.standard_normal(HEAD_SIZE) * 0.4
    vector[[7, 40, 71, 104]] = (6, -5, 4, -7)
    return np.asarray(vector / np.linalg.norm(vector))


def rotation() -> None:
    """Draw one key before and after the rotation."""
    vector = key()
    rotated = vector @ make_rotation("qr", HEAD_SIZE, 0)
    with figure("rotation", 9, 2.6) as picture:
        left, right = picture.subplots(1, 2, sharey=True)
        for axes, values, colour, title in (
            (left, vector, BEFORE, "a key of length 1: a few coordinates hold most of it"),
            (right, rotated, AFTER, "the same key, rotated: all coordinates are alike"),
        ):
            axes.bar(range(HEAD_SIZE), values, color=colour, width=1)
            axes.set_title(title, fontsize=9)
            axes.set_xlabel("coordinate")
            axes.spines[["top", "right"]].set_visible(False)


def codebook() -> None:
    """Draw the law of a rotated coordinate, and the centroids that stand for it."""
    book = codebook_of(PRESETS[DEFAULT_PRESET].key, HEAD_SIZE)
    sigma = HEAD_SIZE**-0.5
    across = np.linspace(-3.6 * sigma, 3.6 * sigma, 400)
    density = np.exp(-0.5 * (across / sigma) ** 2) / (sigma * np.sqrt(2 * np.pi))
    with figure("codebook", 9, 2.8) as picture:
        axes = picture.subplots()
        axes.fill_between(across, density, color=AFTER, alpha=0.15, linewidth=0)
        axes.plot(across, density, color=AFTER, label="density of a rotated coordinate")
        for edge in book.boundaries:
            axes.axvline(float(edge), color=LINES, linewidth=0.6)
        axes.plot(
            book.centroids,
            np.zeros(len(book.centroids)),
            "o",
            color=BEFORE,
            clip_on=False,
            label=f"the {len(book.centroids)} centroids; lines are the boundaries between them",
        )
        axes.set_ylim(0)
        axes.set_yticks([])
        axes.set_xlabel(f"value of a coordinate, head size {HEAD_SIZE}")
        picture.legend(loc="outside upper left", ncols=2, frameon=False)
        axes.spines[["top", "right", "left"]].set_visible(False)


def row() -> None:
    """Draw the bytes of a row beside those of a float16 vector."""
    layout = row_layout(PRESETS[DEFAULT_PRESET].key, HEAD_SIZE)
    with figure("row", 9, 1.7) as picture:
        axes = picture.subplots()
        axes.barh(1, HALF_BYTES * HEAD_SIZE, color=BEFORE)
        axes.text(4, 1, f"float16: {HALF_BYTES * HEAD_SIZE} bytes", color="white", va="center")
        axes.barh(0, layout.code_bytes, color=AFTER)
        axes.text(4, 0, f"codes: {layout.code_bytes}", color="white", va="center")
        start = layout.code_bytes
        for field in layout.fields:
            size = field.count * field.size
            axes.barh(0, size, left=start, color="#312e81")
            start += size
        names = ", ".join(
            f"{part.name} as {'a byte' if part.size == 1 else f'float{8 * part.size}'}: "
            f"{part.count * part.size}"
            for part in layout.fields
        )
        axes.text(start + 3, 0, f"{names}; together {layout.row_bytes} bytes", va="center")
        axes.set_yticks([1, 0], ["a vector before", "its row"])
        axes.set_xlabel(f"bytes of one vector of {HEAD_SIZE} coordinates")
        axes.spines[["top", "right"]].set_visible(False)


def context() -> None:
    """Draw what the caches of a whole model take over the context."""
    layers, heads = 28, 8
    tokens = np.array([1, *range(1024, 131_073, 1024)])
    with figure("context", 9, 3) as picture:
        axes = picture.subplots()
        half = 2 * layers * heads * HEAD_SIZE * HALF_BYTES
        axes.plot(tokens, half * tokens / 1e9, color=BEFORE, label="float16")
        for name, style in (("k8v4", ":"), ("int4", "-"), ("int2", "--")):
            preset = PRESETS[name]
            widths = [
                row_layout(codec, HEAD_SIZE).row_bytes for codec in (preset.key, preset.value)
            ]
            planes = [(HEAD_SIZE, width) for width in widths]
            window = window_of(preset.window, preset.sinks, planes)
            size = layers * heads * sum(widths) * (tokens + window.overlay_rows)
            axes.plot(tokens, size / 1e9, style, color=AFTER, label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks([1024, 4096, 16_384, 65_536, 131_072])
        axes.xaxis.set_major_formatter(lambda value, _: f"{int(value):,}")
        axes.set_xlim(1024, 131_072)
        axes.set_ylim(1e-2)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xlabel("tokens in the caches")
        axes.set_ylabel("GB of one sequence")
        axes.set_title(f"{layers} layers, {heads} key/value heads of {HEAD_SIZE}", fontsize=9)
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)


def decode() -> None:
    """Draw the time of a decode step over the context, in multiples of reading the cache once."""
    shapes = list(dict.fromkeys(entry["shape"] for entry in measured.document()["rows"]))
    with figure("decode", 9, 4.2) as picture:
        for axes, shape in zip(picture.subplots(1, len(shapes), sharey=True), shapes, strict=True):
            rows = measured.rows(shape, 1)
            for at, peer in enumerate(sorted({entry["peer"] for entry in rows})):
                peer_rows = [entry for entry in rows if entry["peer"] == peer]
                style: dict[str, Any] = {"color": f"C{at}", "linewidth": 1}
                if peer == measured.OURS:
                    style = {"color": AFTER, "linewidth": 2.5}
                across = [entry["context"] for entry in peer_rows]
                axes.plot(
                    across, [entry["floor_ratio"] for entry in peer_rows], ".-", label=peer, **style
                )
            axes.axhline(1, color=LINES, linewidth=0.8)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            ticks = measured.contexts(rows)
            axes.set_xticks(ticks, [f"{tokens:,}" for tokens in ticks])
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.set_xlabel("tokens in the cache")
            axes.set_title(f"{shape} heads, one thread", fontsize=9)
            axes.spines[["top", "right"]].set_visible(False)
        picture.axes[0].set_ylabel("time / reading the int4 cache once")
        handles, labels = picture.axes[0].get_legend_handles_labels()
        picture.legend(handles, labels, loc="outside right upper", frameon=False)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for draw in (rotation, codebook, row, context, decode):
        draw()
