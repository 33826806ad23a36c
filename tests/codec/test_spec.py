"""Row layouts and their digest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tq_onnx.codec import spec
from tq_onnx.codec.kind import NORM_KEPT, UNBIASED
from tq_onnx.codec.presets import DEFAULT_PRESET, NO_ROTATION, PRESETS, ROTATIONS, find_preset
from tq_onnx.codec.rotated import LLOYD_MAX, PROD, U8
from tq_onnx.codec.spec import CODECS, KINDS, Codec, layout_digest, row_layout
from tq_onnx.codec.unrotated import FP8, Q8_0, RAW, UNIFORM
from tq_onnx.errors import UsageError

HEAD_SIZES = range(spec.HEAD_SIZE_MULTIPLE, spec.MAX_HEAD_SIZE + 1, spec.HEAD_SIZE_MULTIPLE)


@pytest.mark.parametrize(
    ("codec", "sizes"),
    [
        (Codec(LLOYD_MAX, 1), {64: 10, 80: 12, 128: 18}),
        (Codec(LLOYD_MAX, 2), {64: 18, 80: 22, 128: 34}),
        (Codec(LLOYD_MAX, 3), {64: 26, 80: 32, 128: 50}),
        (Codec(LLOYD_MAX, 4), {64: 34, 80: 42, 128: 66}),
        (Codec(LLOYD_MAX, 5), {64: 42, 80: 52, 128: 82}),
        (Codec(UNIFORM, 2), {64: 20, 80: 24, 128: 36}),
        (Codec(UNIFORM, 3), {64: 28, 80: 34, 128: 52}),
        (Codec(UNIFORM, 4), {64: 36, 80: 44, 128: 68}),
        (Codec(FP8, 8), {64: 64, 80: 80, 128: 128}),
        (Codec(Q8_0, 8), {64: 68, 80: 86, 128: 136}),  # 80: two blocks of 32 and one of 16
        (Codec(PROD, 3), {64: 28, 80: 34, 128: 52}),
        (Codec(PROD, 4), {64: 36, 80: 44, 128: 68}),
        (Codec(U8, 4), {64: 68, 80: 84, 128: 132}),
    ],
    ids=str,
)
def test_row_bytes(codec: Codec, sizes: dict[int, int]) -> None:
    assert {size: row_layout(codec, size).row_bytes for size in sizes} == sizes


@pytest.mark.parametrize("codec", [codec for codec in CODECS if not codec.is_raw], ids=str)
def test_planes_and_fields_tile_the_row(codec: Codec) -> None:
    for head_size in HEAD_SIZES:
        layout = row_layout(codec, head_size)
        end = shift = 0
        for plane in layout.planes:
            assert (plane.offset, plane.shift) == (end, shift)
            assert plane.size * 8 == head_size * plane.width
            end, shift = plane.offset + plane.size, plane.shift + plane.width
        assert end == layout.code_bytes
        assert shift == (8 if codec.kind == U8 else codec.bits)
        for field in layout.fields:
            assert layout.field(field.name) is field
            assert field.offset == end
            assert field.size in (2, 4)
            end += field.count * field.size
        assert layout.row_bytes == end


def test_fields() -> None:
    def named(codec: Codec) -> list[tuple[str, int, int]]:
        return [(f.name, f.count, f.size) for f in row_layout(codec, 80).fields]

    assert named(Codec(LLOYD_MAX, 4)) == [("scale", 1, 2)]
    assert named(Codec(UNIFORM, 4)) == [("scale", 1, 2), ("zero", 1, 2)]
    assert named(Codec(Q8_0, 8)) == [("scale", 3, 2)]
    assert named(Codec(PROD, 4)) == [("scale", 1, 2), ("residual_norm", 1, 2)]
    assert named(Codec(U8, 4)) == [("scale", 1, 4)]
    assert named(Codec(FP8, 8)) == []
    with pytest.raises(KeyError, match="zero"):
        row_layout(Codec(LLOYD_MAX, 4), 80).field("zero")


@pytest.mark.parametrize("bits", KINDS[RAW].bits)
def test_a_raw_row_is_the_vector(bits: int) -> None:
    for head_size in HEAD_SIZES:
        layout = row_layout(Codec(RAW, bits), head_size)
        assert layout.row_bytes == layout.code_bytes == head_size * bits // 8
        assert layout.planes == layout.fields == ()


@pytest.mark.parametrize(
    ("codec", "needs"),
    [
        (Codec(LLOYD_MAX, 5), (True, True, 5, 32, 80)),
        (Codec(PROD, 4), (True, True, 3, 8, 160)),
        (Codec(U8, 4), (True, False, 4, 16, 80)),
        (Codec(UNIFORM, 3), (False, False, 0, 0, 80)),
        (Codec(FP8, 8), (False, False, 0, 0, 80)),
        (Codec(Q8_0, 8), (False, False, 0, 0, 80)),
        (Codec(RAW, 16), (False, False, 0, 0, 80)),
    ],
    ids=str,
)
def test_what_a_codec_needs(codec: Codec, needs: tuple[bool, bool, int, int, int]) -> None:
    found = (codec.is_rotated, codec.corrects_norm, codec.index_bits, codec.levels)
    assert (*found, codec.coordinates(80)) == needs


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
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_head_sizes_that_no_row_holds(codec: Codec, head_size: int) -> None:
    with pytest.raises(ValueError, match=f"head size {head_size} "):
        row_layout(codec, head_size)


@pytest.mark.parametrize(
    ("kind", "bits"),
    [
        *((LLOYD_MAX, 0), (LLOYD_MAX, 6), (LLOYD_MAX, 16), (RAW, 4), (RAW, 64)),
        *((UNIFORM, 5), (UNIFORM, 8), (FP8, 4), (Q8_0, 4), (PROD, 2), (PROD, 5), (U8, 8)),
        ("turbo", 4),
    ],
)
def test_codecs_that_do_not_exist(kind: str, bits: int) -> None:
    with pytest.raises(ValueError, match=kind):
        Codec(kind, bits)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"number": 0}, "lloyd_max and new have the same number 0; give the new one the next"),
        ({"number": len(KINDS) + 1}, f"new has the number {len(KINDS) + 1}; the next is "),
        ({"number": len(KINDS), "name": RAW}, "there are two codec kinds raw"),
    ],
)
def test_a_kind_with_a_place_that_is_taken_is_refused(
    change: dict[str, Any], sentence: str
) -> None:
    kinds = list(KINDS.values())
    new = replace(KINDS[LLOYD_MAX], name="new", number=len(KINDS))
    assert list(spec.in_order([new, *kinds])) == [*KINDS, "new"]
    with pytest.raises(ValueError, match=sentence):
        spec.in_order([*kinds, replace(new, **change)])


def test_digest_is_frozen() -> None:
    # The library carries the digest of all codecs, and models in the field those of the codecs that
    # they use, such as int4. Whoever changes what a stored byte means changes it with
    # LAYOUT_VERSION; whoever did not mean to has found out here. A new codec changes only the
    # first.
    assert layout_digest({Codec(LLOYD_MAX, 4)}, has_planes=False) == "e438d471367fa36d"
    assert (spec.LAYOUT_VERSION, layout_digest()) == (3, "a13118f5e93715f1")
    # Libraries that know rows only are refused: they would take planes for rows.
    assert layout_digest() != layout_digest(has_planes=False)


def test_a_digest_is_that_of_the_codecs_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    used = {Codec(LLOYD_MAX, 4), Codec(RAW, 16)}
    facts = {"has_window": False, "has_planes": False}
    before = layout_digest(used, **facts)
    assert before != layout_digest({Codec(LLOYD_MAX, 4)}, **facts)
    changed = replace(KINDS[UNIFORM], planes={**KINDS[UNIFORM].planes, 3: (1, 2)})
    monkeypatch.setitem(KINDS, UNIFORM, changed)
    assert layout_digest(used, **facts) == before
    assert spec.is_layout_of(before, used, **facts)
    assert not spec.is_layout_of(before, {Codec(UNIFORM, 3)}, **facts)
    # What models have that were converted when all codecs shared one.
    first = "d0a46b4e80332dff"
    assert spec.is_layout_of(first, used, **facts)
    for name in facts:
        assert not spec.is_layout_of(before, used, **{**facts, name: True})
        assert not spec.is_layout_of(first, used, **{**facts, name: True})


def test_digest_follows_the_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    before = layout_digest()
    changed = replace(KINDS[UNIFORM], planes={**KINDS[UNIFORM].planes, 3: (1, 2)})
    monkeypatch.setitem(KINDS, UNIFORM, changed)
    assert layout_digest() != before


def test_presets_are_complete() -> None:
    assert DEFAULT_PRESET in PRESETS
    for name, preset in PRESETS.items():
        assert name == preset.name
        rotated = preset.key.is_rotated or preset.value.is_rotated
        assert preset.rotation in (ROTATIONS if rotated else (NO_ROTATION,))
        assert preset.source


TABLE = {
    "int4": ("lloyd_max 4", "lloyd_max 4", "qr"),
    "int5": ("lloyd_max 5", "lloyd_max 5", "qr"),
    "int3": ("lloyd_max 3", "lloyd_max 3", "qr"),
    "int2": ("lloyd_max 2", "lloyd_max 2", "qr"),
    "k5v3": ("lloyd_max 5", "lloyd_max 3", "qr"),
    "k4v3": ("lloyd_max 4", "lloyd_max 3", "qr"),
    "k4v2": ("lloyd_max 4", "lloyd_max 2", "qr"),
    "mse4": ("lloyd_max 4", "lloyd_max 4", "qr"),
    "mse3": ("lloyd_max 3", "lloyd_max 3", "qr"),
    "mse2": ("lloyd_max 2", "lloyd_max 2", "qr"),
    "mse1": ("lloyd_max 1", "lloyd_max 1", "qr"),
    "prod4": ("prod 4", "prod 4", "qr"),
    "prod3": ("prod 3", "prod 3", "qr"),
    "k8v4": ("fp8_e4m3 8", "uniform 4", "none"),
    "4bit_nc": ("lloyd_max 4", "uniform 4", "hadamard"),
    "k3v4_nc": ("lloyd_max 3", "uniform 4", "hadamard"),
    "3bit_nc": ("lloyd_max 3", "uniform 3", "hadamard"),
    "safe-lowbit": ("q8_0 8", "lloyd_max 4", "hadamard"),
    "balanced": ("lloyd_max 4", "lloyd_max 4", "hadamard"),
    "experimental-max": ("prod 3", "prod 3", "hadamard"),
    "ascend-u8": ("u8 4", "u8 4", "qr"),
}


def test_every_row_of_the_specification_is_there() -> None:
    rows = {p.name: (str(p.key), str(p.value), p.rotation) for p in PRESETS.values()}
    assert {name: rows[name] for name in TABLE} == TABLE
    assert {name for name in rows if PRESETS[name].experimental} == {
        *("prod4", "prod3", "experimental-max")
    }
    corrected = {name for name in TABLE if PRESETS[name].norm_correction == NORM_KEPT}
    assert {"4bit_nc", "k3v4_nc", "3bit_nc"} <= corrected
    assert not corrected & {"balanced", "prod4", "mse4", "mse1", "int4"}
    searching = {name for name in TABLE if PRESETS[name].gains}
    assert searching == {"int4", "int5", "int3", "int2", "k5v3", "k4v3", "k4v2"}
    assert all(PRESETS[name].norm_correction == UNBIASED for name in searching)


@pytest.mark.parametrize("name", ["k8v4", "4bit_nc", "k3v4_nc", "3bit_nc"])
def test_vllms_names_are_presets(name: str) -> None:
    assert find_preset(f"turboquant_{name}") is find_preset(name) is PRESETS[name]


def test_cache_types_of_other_tools_are_told_a_preset() -> None:
    for kind in ("q8_0", "q4_0", "iq4_nl", "fp8_e4m3", "int8_per_token_head", "nvfp4"):
        with pytest.raises(UsageError, match=f"'{kind}' is a cache type of ") as refusal:
            find_preset(kind)
        assert refusal.value.fix.removeprefix("use the nearest preset, ") in PRESETS
    with pytest.raises(UsageError, match="run the model as it is"):
        find_preset("bf16")
    with pytest.raises(UsageError, match="not one of int4"):
        find_preset("q9")


@pytest.mark.parametrize("name", ["int2.75", "int2.5"])
def test_presets_of_before_are_told_what_to_use(name: str) -> None:
    with pytest.raises(UsageError, match=r"int2\.75 and int2\.5 were removed") as refusal:
        find_preset(name)
    assert refusal.value.fix == "use int3, or int2 calibrated"
