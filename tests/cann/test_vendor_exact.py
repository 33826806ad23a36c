"""Exact tokens and head sinks beside CANN's attention: our kernel joins what that gave.

Outputs are held to the numpy reference in float64, over what the device wrote.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from simulated_kernels import SIGNED4, rotation_of, row_bytes
from tests.cann.fake_acl import FakeAcl
from tests.cann.session import CANN
from tests.cann.test_vendor_host import ATTENTION, Decoding, Sizes, mistakes
from tq_onnx.codec import reference
from tq_onnx.codec.codebook import codebook_of
from tq_onnx.codec.planes import field_bytes, planes_of_rows, rows_of_planes
from tq_onnx.codec.window import NO_WINDOW, window_of, write_entries

pytestmark = [pytest.mark.cann, pytest.mark.usefixtures("kernels_named")]

DIGITS = 1e-3
"""What CANN's four digits and its float16 cost."""
SHORT = 4e-3
"""The same where a query sees few tokens, each of which weighs much."""


class Exact(Decoding):
    """Steps of a layer with exact tokens, each held to the reference."""

    def __init__(
        self,
        folder: Path,
        entries: tuple[int, int] = (12, 3),
        *,
        size: int = 64,
        group: int = 2,
        batch: int = 1,
        tokens: int = 90,
        dtype: str = "float32",
        sliding_window: int = 0,
        padding: tuple[int, ...] = (),
        head_sink: bool = False,
    ) -> None:
        width = row_bytes(size, SIGNED4)
        window = window_of(*entries, [(size, width)]) if any(entries) else NO_WINDOW
        sizes = Sizes(size, 2, group, batch, window.overlay_rows + tokens)
        sink = np.random.default_rng(1).standard_normal(2 * group).astype(dtype)
        super().__init__(
            dtype, sizes, folder, sliding_window, padding,
            exact=window, head_sink=sink if head_sink else None,
        )  # fmt: skip

    def fields(self) -> int:
        return field_bytes(SIGNED4, self.sizes.head_size)

    def check(self, past: list[int], tokens: int, limit: float = SHORT) -> None:
        vectors = self.sizes.vectors(tokens, self.dtype, sum(past) + tokens)
        out = self.step(past, vectors)
        size, overlay = self.sizes.head_size, self.exact.overlay_rows
        book = codebook_of(SIGNED4, size).centroids
        caches = (each.numpy() for each in self.caches.values())
        expected = reference.attention(
            vectors["query"], *(rows_of_planes(each, self.fields(), overlay) for each in caches),
            np.array(past), key=SIGNED4, value=SIGNED4,
            key_rotation=rotation_of(size), key_codebook=book,
            value_rotation=rotation_of(size, 1), value_codebook=book,
            scale=size**-0.5, causal=True, window=self.exact,
            new_keys=vectors["key"], new_values=vectors["value"], sliding_window=self.window,
            head_sink=self.head_sink, left_padding=np.array(self.padding),
        )  # fmt: skip
        np.testing.assert_allclose(out, expected, atol=limit)


def calls(fake: FakeAcl) -> tuple[int, int]:
    """Of CANN's attention and of our kernels."""
    counts = fake.counts()
    ours = sum(n for name, n in counts.items() if name.startswith("kernel.tq_attention"))
    return counts.get(f"op.{ATTENTION}", 0), ours


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("size, group", [(64, 1), (64, 3), (128, 5), (128, 12)])
def test_lengths_around_each_boundary(
    fake: FakeAcl, tmp_path: Path, dtype: str, size: int, group: int
) -> None:
    """The 16th token is the first between 3 sinks and 12 recent ones."""
    decoding = Exact(tmp_path, size=size, group=group, dtype=dtype)
    fake.set_delay(300)
    decoding.check([0], 2)
    decoding.check([2], 1)
    decoding.check([3], 11)
    assert calls(fake) == (0, 3)
    for past in (14, 15, 16):
        decoding.check([past], 1)
    assert calls(fake) == (2, 6)
    decoding.check([17], 60)
    decoding.check([77], 1)
    # Rewound: entries are those of later tokens, and codes are read in front and behind.
    decoding.check([40], 1)
    decoding.check([2], 1)
    decoding.check([30], 1)
    assert calls(fake) == (5, 11)
    assert {node.provider for node in decoding.session.end()} == {CANN}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_sequences_of_lengths_and_paddings_of_their_own(
    fake: FakeAcl, tmp_path: Path, dtype: str
) -> None:
    """One has no middle, and two of the same length share a launch."""
    decoding = Exact(tmp_path, batch=3, dtype=dtype, head_sink=True)
    decoding.check([0], 40)
    for past in ([40, 7, 33], [41, 41, 3], [16, 15, 14], [15, 14, 14]):
        before = calls(fake)
        decoding.check(past, 1)
        now = calls(fake)
        assert now[0] - before[0] == sum(length >= 15 for length in past)
        assert now[1] - before[1] == len(set(past))
    padded = Exact(tmp_path, batch=3, dtype=dtype, padding=(5, 0, 31))
    for past, tokens in (([0], 20), ([20], 1), ([21], 40), ([61], 1)):
        padded.check(past, tokens)


@pytest.mark.parametrize("entries", [(12, 3), (0, 3), (12, 0)])
@pytest.mark.parametrize("sliding_window", [5, 12, 13, 40])
def test_beside_a_sliding_window(
    tmp_path: Path, fake: FakeAcl, sliding_window: int, entries: tuple[int, int]
) -> None:
    decoding = Exact(tmp_path, entries, sliding_window=sliding_window, padding=(2,))
    for past, tokens in ((0, 14), (14, 1), (15, 1), (16, 50), (66, 1)):
        decoding.check([past], tokens)
    least = min(entries[0], sliding_window)
    assert (calls(fake)[0] > 0) == (least < sliding_window)


@pytest.mark.parametrize("sliding_window", [0, 20])
def test_sinks_of_heads_without_exact_tokens(
    fake: FakeAcl, tmp_path: Path, sliding_window: int
) -> None:
    """All codes are CANN's; our kernel adds what has no value. A mask hides slots."""
    decoding = Exact(tmp_path, (0, 0), head_sink=True, group=4, sliding_window=sliding_window)
    for past, tokens in ((0, 30), (30, 1), (31, 1)):
        decoding.check([past], tokens)
    assert calls(fake) == (2, 3)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_32768_tokens(fake: FakeAcl, tmp_path: Path, dtype: str) -> None:
    """Of a cache that is there already; queries are long, so that few of the tokens count."""
    past = 32767
    decoding = Exact(tmp_path, (64, 4), tokens=past + 9, dtype=dtype)
    sizes, rng = decoding.sizes, np.random.default_rng(3)
    shape = (*sizes.cache[:2], past, 64)
    for kind in decoding.caches:
        rows = np.zeros(sizes.cache, np.uint8)
        first = decoding.exact.overlay_rows
        rows[:, :, first:, :32] = rng.integers(0, 256, (*rows.shape[:2], past + 9, 32), np.uint8)
        scales = rng.uniform(0.1, 0.3, (*rows.shape[:2], past + 9, 1)).astype("<f4")
        rows[:, :, first:, 32:] = scales.view(np.uint8)
        vectors = rng.standard_normal(shape).astype(np.float32)
        write_entries(rows, vectors, np.zeros(1, np.int64), decoding.exact)
        cache = planes_of_rows(rows, decoding.fields(), first)
        decoding.caches[kind] = ort.OrtValue.ortvalue_from_numpy(cache, "cann", 0)
    decoding.check([past], 1, DIGITS)
    assert calls(fake) == (1, 1)


@pytest.mark.parametrize("refused", [True, False])
def test_codes_that_cann_refuses(tmp_path: Path, refused: bool) -> None:
    """In a process of its own: our kernel attends alone, also where it has nothing to join."""
    script = f"""
import ctypes, sys
from pathlib import Path
from tests.cann.fake_acl import FakeAcl
from tests.cann.test_vendor_exact import Exact, calls
fake = FakeAcl.load()
if {refused}:
    ctypes.CDLL("libopapi.so").fake_acl_refuse_operator(b"{ATTENTION} of INT4")
for entries in ((12, 3), (0, 0)):
    decoding = Exact(Path(sys.argv[1]), entries)
    decoding.check([0], 20)
    for past in (20, 21):
        fake.reset()
        decoding.check([past], 1)
        print(*calls(fake))
assert fake.violations() == 0, fake.last_violation()
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    alone = ["0 1"] * 4
    assert ran.stdout.split("\n")[:4] == (alone if refused else ["1 1", "1 1", "1 0", "1 0"])
    assert ran.stderr.count("CANN's attention over codes is not used") == refused


@pytest.mark.parametrize("what", ["exact tokens", "sinks of heads"])
def test_without_the_library_of_our_kernels(
    fake: FakeAcl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.delenv("TQ_ONNX_CANN_KERNELS")
    is_exact = what == "exact tokens"
    with pytest.raises(Exception, match="kernel library for CANN cannot be opened"):
        Exact(tmp_path, (12, 3) if is_exact else (0, 0), head_sink=not is_exact)


MISTAKES: dict[str, dict[str, object]] = {
    "a token": {},
    "a float16 token of several sequences": {"size": 128, "group": 4, "batch": 2,
                                             "dtype": "float16"},
    "a token in a window behind padding": {"batch": 2, "padding": (1, 6), "sliding_window": 25,
                                           "head_sink": True},
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_in_calls_are_seen(fake: FakeAcl, tmp_path: Path, case: str) -> None:
    decoding = Exact(tmp_path, **MISTAKES[case])  # type: ignore[arg-type]
    decoding.step([0], decoding.sizes.vectors(40, decoding.dtype, 1))
    total, missed = mistakes(fake, decoding, 40, 1, {2, 3, 4})
    print(f"{case}: {total} mistakes")
    assert not missed, f"{len(missed)} of {total}: {missed}"


def test_a_middle_that_is_hidden_by_a_mask_or_by_moving(fake: FakeAcl, tmp_path: Path) -> None:
    """Tensors move up where entries behind the scales leave room; else a mask hides slots."""
    few = Exact(tmp_path, (1, 1), tokens=300, padding=(250,))
    many = Exact(tmp_path, (12, 3), tokens=300, padding=(250,))
    for decoding in (few, many):
        decoding.check([0], 280)
        fake.reset()
        decoding.check([280], 1)
        assert calls(fake) == (1, 1)
