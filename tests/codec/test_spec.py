"""Row layouts and their digest."""

from __future__ import annotations

import pytest

from tq_onnx.codec import spec
from tq_onnx.codec.presets import DEFAULT_PRESET, NO_ROTATION, PRESETS, ROTATIONS
from tq_onnx.codec.spec import (
    LLOYD_MAX,
    LLOYD_MAX_BITS,
    RAW,
    RAW_BITS,
    Codec,
    layout_digest,
    row_layout,
)

HEAD_SIZES = range(spec.HEAD_SIZE_MULTIPLE, spec.MAX_HEAD_SIZE + 1, spec.HEAD_SIZE_MULTIPLE)


@pytest.mark.parametrize(
    ("bits", "head_size", "row_bytes"),
    [(4, 128, 66), (3, 128, 50), (2, 128, 34), (4, 64, 34), (3, 64, 26), (2, 64, 18), (3, 80, 32)],
)
def test_row_bytes(bits: int, head_size: int, row_bytes: int) -> None:
    assert row_layout(Codec(LLOYD_MAX, bits), head_size).row_bytes == row_bytes


@pytest.mark.parametrize("bits", LLOYD_MAX_BITS)
@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_planes_tile_the_row(bits: int, head_size: int) -> None:
    layout = row_layout(Codec(LLOYD_MAX, bits), head_size)
    end = shift = 0
    for plane in layout.planes:
        assert (plane.offset, plane.shift) == (end, shift)
        assert plane.size * 8 == head_size * plane.width
        end, shift = plane.offset + plane.size, plane.shift + plane.width
    assert (end, shift) == (layout.scale_offset, bits)
    assert layout.row_bytes == end + spec.SCALE_BYTES


@pytest.mark.parametrize("bits", RAW_BITS)
@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_a_raw_row_is_the_vector(bits: int, head_size: int) -> None:
    layout = row_layout(Codec(RAW, bits), head_size)
    assert layout.row_bytes == head_size * bits // 8
    assert layout.planes == ()
    assert layout.scale_offset == layout.row_bytes  # there is none


def test_raw_takes_its_width_from_the_model() -> None:
    assert Codec(RAW, 32).for_elements(16) == Codec(RAW, 16)
    assert Codec(RAW, 16).for_elements(32) == Codec(RAW, 32)
    assert Codec(LLOYD_MAX, 3).for_elements(16) == Codec(LLOYD_MAX, 3)
    with pytest.raises(ValueError, match="raw has no 8-bit form"):
        Codec(RAW, 32).for_elements(8)


def test_raw_has_no_codebook() -> None:
    assert Codec(RAW, 16).levels == 0
    assert Codec(LLOYD_MAX, 3).levels == 8
    assert [Codec(RAW, 16).is_raw, Codec(LLOYD_MAX, 3).is_raw] == [True, False]


@pytest.mark.parametrize("head_size", [0, -8, 4, 12, 100, 520])
@pytest.mark.parametrize("codec", [Codec(LLOYD_MAX, 4), Codec(RAW, 16)], ids=str)
def test_head_sizes_that_no_row_holds(codec: Codec, head_size: int) -> None:
    with pytest.raises(ValueError, match=f"head size {head_size} "):
        row_layout(codec, head_size)


@pytest.mark.parametrize(
    ("kind", "bits"),
    [("uniform", 4), (LLOYD_MAX, 1), (LLOYD_MAX, 6), (LLOYD_MAX, 16), (RAW, 4), (RAW, 64)],
)
def test_codecs_that_do_not_exist(kind: str, bits: int) -> None:
    with pytest.raises(ValueError, match=kind):
        Codec(kind, bits)


def test_digest_is_frozen() -> None:
    # Caches and converted models in the field carry this digest. Whoever changes what a stored byte
    # means changes it with LAYOUT_VERSION; whoever did not mean to has found out here.
    assert (spec.LAYOUT_VERSION, layout_digest()) == (2, "0c189e9e2a1891ba")


def test_digest_follows_the_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    before = layout_digest()
    monkeypatch.setitem(spec.PLANES, 3, (1, 2))
    assert layout_digest() != before


def test_presets_are_complete() -> None:
    assert DEFAULT_PRESET in PRESETS
    for name, preset in PRESETS.items():
        assert name == preset.name
        rotated = [codec for codec in (preset.key, preset.value) if not codec.is_raw]
        assert preset.rotation in (ROTATIONS if rotated else (NO_ROTATION,))
        assert preset.source
