"""Calibration files: what is written is read, and nothing else is."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tq_onnx.codec.calibration import LayerStatistics
from tq_onnx.codec.rotaryangles import Pairing, Rotary
from tq_onnx.conversion import calibrationfile
from tq_onnx.conversion.calibrationfile import (
    check_target,
    content_digest,
    read_calibration,
    write_calibration,
)
from tq_onnx.errors import ModelFileError, OutputExistsError, TqOnnxError
from tq_onnx.files.transaction import Transaction

P, H, N, D = 5, 4, 2, 8
Tensors = dict[str, np.ndarray]
PAIRS = Pairing("halves", 0, 6)
FREQUENCIES = np.float32([1, 0.5, 0, 1, 0.5, 0, 0, 0])
FACTS = {
    "format": "tq_onnx.calibration",
    "format_version": "8",
    "tool_version": "0.1.0",
    "tokens": "640",
    "context": "128",
    "text_digest": "ab" * 32,
    "clamped_layers": "[]",
    "rotary": json.dumps(2 * [{**PAIRS.document, "angles": "the test"}]),
}


def tensors(
    layers: int = 2, pairs: Pairing = PAIRS, frequencies: np.ndarray = FREQUENCIES
) -> Tensors:
    """Statistics of so many layers, with heads as wide as the frequencies."""
    size = len(frequencies)
    rng = np.random.default_rng(0)
    made: Tensors = {
        "counts": np.array([5, 5, 5, 5, 620]),
        "fingerprint_tokens": np.array([7, 0, 255]),
    }
    for layer in range(layers):
        for name, shape in (("k", (P, N, size)), ("v", (P, N, size)), ("q", (H, size))):
            draws = rng.standard_normal(shape).astype(np.float32)
            if name != "q":
                made[f"layers.{layer}.{name}_mean"] = draws
            made[f"layers.{layer}.{name}_energy"] = draws**2 + 1
        queries = rng.standard_normal((H, 40, size)).astype(np.float32)
        made[f"layers.{layer}.q_energy"] = (queries**2).mean(1)
        grouped = queries.reshape(N, -1, size)
        products = grouped.transpose(0, 2, 1) @ grouped / grouped.shape[1]
        made[f"layers.{layer}.query_covariance"] = products
        for name in ("k", "v"):
            draws = rng.standard_normal((N, size)).astype(np.float32)
            made[f"layers.{layer}.{name}_fingerprint"] = draws
        made[f"layers.{layer}.frequencies"] = frequencies.copy()
        mean = Rotary(frequencies, pairs, "").turned_mean(draws.astype(np.float64))
        made[f"layers.{layer}.k_turned_mean"] = mean.astype(np.float32)
    return made


def save(made: Tensors, path: Path, facts: dict[str, str]) -> None:
    """A file whose digest is that of its content."""
    content = {name: np.ascontiguousarray(tensor) for name, tensor in made.items()}
    save_file(content, path, {**facts, "content_digest": content_digest(content, facts)})


TURNING = ("frequencies", "k_turned_mean")


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    path = tmp_path / "sound.safetensors"
    save(tensors(), path, FACTS)
    return path


def test_round_trip(sound: Path, tmp_path: Path) -> None:
    found = read_calibration(sound)
    wanted = tensors()
    np.testing.assert_array_equal(found.counts, wanted["counts"])
    assert (found.tokens, found.context, found.tool_version) == (640, 128, "0.1.0")
    assert found.text_digest == FACTS["text_digest"]
    assert found.fingerprint_tokens == (7, 0, 255)
    assert len(found.layers) == 2
    for index, layer in enumerate(found.layers):
        for field in fields(LayerStatistics):
            table = getattr(layer, field.name)
            if field.name in ("pairing", "angles"):
                assert table == {"pairing": PAIRS, "angles": "the test"}[field.name]
                continue
            narrow = field.name.endswith(("_covariance", "frequencies"))
            assert table.dtype == (np.float32 if narrow else np.float64)
            np.testing.assert_array_equal(table, wanted[f"layers.{index}.{field.name}"])
    again = tmp_path / "deep" / "again.safetensors"  # its folder is made
    write_calibration(again, found)
    second = read_calibration(again)
    np.testing.assert_array_equal(second.layers[1].k_mean, found.layers[1].k_mean)
    np.testing.assert_array_equal(second.scales(1), found.scales(1))
    wide = second.layers[1].query_covariance
    np.testing.assert_array_equal(wide, found.layers[1].query_covariance)
    for field in ("tokens", "context", "tool_version", "text_digest"):
        assert getattr(second, field) == getattr(found, field)
    np.testing.assert_array_equal(second.frequencies(1), found.frequencies(1))
    np.testing.assert_array_equal(second.offsets(1)[0], found.offsets(1)[0])


def test_a_layer_whose_keys_turn_nobody_knows_how(tmp_path: Path) -> None:
    made, reason = tensors(), {"angles": "nobody knows"}
    for name in TURNING:
        made[f"layers.1.{name}"] *= 0
    facts = {**FACTS, "rotary": json.dumps([{**PAIRS.document, "angles": "the test"}, reason])}
    save(made, tmp_path / "file", facts)
    found = read_calibration(tmp_path / "file")
    assert found.turns_unknown == "the keys of layer 1 are not centered: nobody knows"
    named = replace(found.layers[1], angles="\N{GREEK SMALL LETTER MU}" + 300 * "/cos")
    write_calibration(tmp_path / "again", replace(found, layers=(found.layers[0], named)))
    again = read_calibration(tmp_path / "again").layers[1]
    assert (again.pairing, again.angles) == (None, ("?" + 300 * "/cos")[:200])
    made["layers.1.k_turned_mean"] += 1
    save(made, tmp_path / "file", facts)
    refused(tmp_path / "file", "layer 1 has a mean that does not turn in pairs")


@pytest.mark.parametrize("version", ["1", "7"])
def test_files_of_earlier_versions_are_refused(tmp_path: Path, version: str) -> None:
    save(tensors(), tmp_path / "old", {**FACTS, "format_version": version})
    with pytest.raises(ModelFileError) as caught:
        read_calibration(tmp_path / "old")
    told = "an earlier version of tq-onnx wrote the calibration file; run `tq-onnx calibrate` again"
    assert str(caught.value) == f"{tmp_path / 'old'}: {told}"


def exchange(name: str, other: str) -> Callable[[Tensors, dict[str, str]], None]:
    """Exchange what two prefixes begin."""

    def edit(made: Tensors, facts: dict[str, str]) -> None:
        for key in [key for key in made if key.startswith(name)]:
            there = other + key[len(name) :]
            if there not in made:  # values do not turn
                continue
            made[key], made[there] = made[there], made[key]

    return edit


def reverse_heads(made: Tensors, facts: dict[str, str]) -> None:
    for name in made:
        if name.endswith(("k_mean", "k_energy")):
            made[name] = made[name][:, ::-1]


@pytest.mark.parametrize(
    "edit",
    [
        exchange("layers.0.", "layers.1."),
        exchange("layers.0.k_mean", "layers.1.k_mean"),
        exchange("layers.0.k_", "layers.0.v_"),
        reverse_heads,
        lambda made, facts: facts.__setitem__("context", "4096"),
    ],
    ids=["layers", "means", "keys and values", "heads", "context"],
)
def test_tables_that_changed_their_places_are_noticed(
    tmp_path: Path, edit: Callable[[Tensors, dict[str, str]], None]
) -> None:
    made, facts = tensors(), dict(FACTS)
    digest = content_digest(made, facts)
    edit(made, facts)
    content = {name: np.ascontiguousarray(tensor) for name, tensor in made.items()}
    save_file(content, tmp_path / "edited", {**facts, "content_digest": digest})
    refused(tmp_path / "edited", "its content is not what was written")
    save(made, tmp_path / "sound", facts)
    read_calibration(tmp_path / "sound")


def test_a_file_that_would_not_be_read_is_not_written(
    sound: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = read_calibration(sound)
    size = sound.stat().st_size
    monkeypatch.setattr(calibrationfile, "_LARGEST_FILE", size - 1000)
    with pytest.raises(ModelFileError, match="bytes, more than are read again"):
        write_calibration(sound.parent / "new", found)
    assert list(sound.parent.iterdir()) == [sound]


def test_the_same_statistics_give_the_same_bytes(sound: Path, tmp_path: Path) -> None:
    found = read_calibration(sound)
    contents = set()
    for number in range(8):
        path = tmp_path / str(number)
        write_calibration(path, found)
        contents.add(path.read_bytes())
    assert len(contents) == 1


def test_many_layers_keep_their_order(tmp_path: Path) -> None:
    path = tmp_path / "many"
    rotary = json.dumps(12 * json.loads(FACTS["rotary"])[:1])
    save(tensors(12), path, {**FACTS, "rotary": rotary})
    found = read_calibration(path)
    for index in (2, 10, 11):
        wanted = tensors(12)[f"layers.{index}.v_mean"]
        np.testing.assert_array_equal(found.layers[index].v_mean, wanted)


def without(*names: str) -> Callable[[Tensors, dict[str, str]], None]:
    def edit(made: Tensors, facts: dict[str, str]) -> None:
        for name in names:
            (made if name in made else facts).pop(name)

    return edit


def with_tensor(name: str, tensor: object) -> Callable[[Tensors, dict[str, str]], None]:
    return lambda made, facts: made.__setitem__(name, np.asarray(tensor))


def with_fact(name: str, value: str) -> Callable[[Tensors, dict[str, str]], None]:
    return lambda made, facts: facts.__setitem__(name, value)


def with_number(name: str, number: float) -> Callable[[Tensors, dict[str, str]], None]:
    return lambda made, facts: made[name].__setitem__((1,) * made[name].ndim, number)


def with_entry(
    name: str, entry: tuple[int, ...], number: float
) -> Callable[[Tensors, dict[str, str]], None]:
    """Add to one entry."""
    return lambda made, facts: made[name].__setitem__(entry, made[name][entry] + number)


def with_pair(
    name: str, entry: tuple[int, int, int], number: float
) -> Callable[[Tensors, dict[str, str]], None]:
    """Set an entry, and the one that mirrors it."""
    head, row, column = entry

    def edit(made: Tensors, facts: dict[str, str]) -> None:
        made[name][head, row, column] = made[name][head, column, row] = number

    return edit


MEAN, COVARIANCE = "layers.1.k_mean", "layers.1.query_covariance"
SQUARE = np.ones((N, D, D), np.float32)
SMALL = np.ones((P, N, D), np.float32)


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (without("counts"), "counts"),
        (with_tensor("counts", [5, 5, 5, 5, 0]), "counts are out of range"),
        (with_tensor("counts", [5, 5, 5, 5, 2**62]), "counts are out of range"),
        (with_tensor("counts", [5.0, 5, 5, 5, 9]), "counts"),
        (with_tensor("counts", [[5, 5, 5, 5, 9]]), "counts"),
        (with_tensor("counts", np.array(5)), "counts"),
        (with_tensor("counts", [5]), "counts"),
        (with_tensor("counts", [5, 5, 5, 9]), "layer 0 has keys of shape (5, 2, 8)"),
        (without(MEAN), "layer 1 has not the tables of this version"),
        (without("layers.0.q_energy"), "layer 0 has not the tables"),
        (without(COVARIANCE), "layer 1 has not the tables"),
        (with_tensor("layers.1.k_fingerprint", SMALL), "layer 1 has a fingerprint of another"),
        (with_tensor("layers.1.v_fingerprint", SMALL[0, :1]), "layer 1 has a fingerprint"),
        (with_number("layers.1.v_fingerprint", np.nan), "not finite"),
        (without("layers.1.v_fingerprint"), "layer 1 has not the tables"),
        (without("fingerprint_tokens"), "fingerprint_tokens are no list of token ids"),
        (with_tensor("fingerprint_tokens", [[1]]), "fingerprint_tokens are no list of token ids"),
        (with_tensor("fingerprint_tokens", [1.0]), "fingerprint_tokens are no list of token ids"),
        (with_tensor("fingerprint_tokens", np.zeros(0, np.int64)), "tokens are out of range"),
        (with_tensor("fingerprint_tokens", np.zeros(65, np.int64)), "tokens are out of range"),
        (with_tensor("fingerprint_tokens", [-1]), "tokens are out of range"),
        (with_tensor("fingerprint_tokens", [2**31]), "tokens are out of range"),
        (without(*(name for name in tensors() if ".0." in name)), "layers are missing"),
        (without(*(name for name in tensors() if "layers" in name)), "layers are missing"),
        (with_tensor("layers.01.k_mean", SMALL), "'layers.01.k_mean' is no table"),
        (with_tensor("layers.\u0661.k_mean", SMALL), "is no table"),
        (with_tensor("layers.99999.k_mean", SMALL), "layers are missing"),
        (with_tensor("layers.1.k_median", SMALL), "'layers.1.k_median' is no table"),
        (with_tensor("x" * 300, SMALL), "xxx' is no table"),
        (with_tensor(MEAN, SMALL.astype(np.float64)), "k_mean' is no table of float32"),
        (with_tensor(MEAN, SMALL.astype(np.float16)), "k_mean' is no table of float32"),
        (with_tensor(MEAN, SMALL[:, :, :7]), "the tables of layer 1 differ in shape"),
        (with_tensor(MEAN, SMALL[:, :1]), "the tables of layer 1 differ in shape"),
        (with_tensor(MEAN, SMALL[0]), "layer 1 has keys of shape (2, 8)"),
        (with_tensor(MEAN, SMALL[:, :0]), "layer 1 has keys of shape (5, 0, 8)"),
        (with_tensor("layers.1.v_mean", SMALL[:4]), "the tables of layer 1 differ"),
        (with_tensor("layers.1.q_energy", SMALL[0, 0]), "queries of shape (8,)"),
        (with_tensor("layers.1.q_energy", np.ones((3, D), np.float32)), "queries of shape (3, 8)"),
        (with_tensor("layers.1.q_energy", np.ones((0, D), np.float32)), "queries of shape (0, 8)"),
        (with_tensor("layers.1.q_energy", np.ones((4, 7), np.float32)), "queries of shape (4, 7)"),
        (with_number(MEAN, np.nan), "not finite"),
        (with_number(MEAN, -np.inf), "not finite"),
        (with_number(MEAN, 1e37), "too large"),
        (with_number("layers.0.q_energy", np.inf), "not finite"),
        (with_number("layers.0.k_energy", -1e-9), "layer 0 has a negative energy"),
        (with_number("layers.0.q_energy", -1), "layer 0 has a negative energy"),
        (without("format"), "the format is not tq_onnx.calibration"),
        (with_fact("format", "pt"), "the format is not tq_onnx.calibration"),
        (with_fact("format_version", "9"), "the version of the format is not 8"),
        (without("format_version"), "the version of the format is not 8"),
        (without("layers.1.frequencies"), "layer 1 has not the tables"),
        (without("layers.1.k_turned_mean"), "layer 1 has not the tables"),
        (with_tensor("layers.1.frequencies", SMALL[0, 0, :7]), "not one angle for each"),
        (with_number("layers.1.frequencies", 4.0), "layer 1 has angles beyond half a turn"),
        (with_number("layers.1.frequencies", 0.25), "angles of coordinates that are no pairs"),
        (with_tensor("layers.1.k_turned_mean", SMALL[:1]), "a turned mean of another shape"),
        (with_number("layers.1.k_turned_mean", 9.0), "layer 1 has a mean that does not turn"),
        (without("rotary"), "the file is not a calibration file"),
        (with_fact("rotary", "[1"), "the file is not a calibration file"),
        (with_fact("rotary", "[" * 20_000), "the rotary is nested"),
        (with_fact("rotary", "{}"), "the rotary is not that of each layer"),
        (with_fact("rotary", "[[], []]"), "the file is not a calibration file"),
        (with_fact("rotary", '[{"angles": "\\u001b"}, 1]'), "the rotary is damaged"),
        (with_fact("rotary", '[{"angles": ""}, {"angles": ""}]'), "angles of coordinates that"),
        (with_fact("rotary", FACTS["rotary"].replace("halves", "h")), "a layout of pairs that"),
        (with_fact("rotary", FACTS["rotary"].replace("6", "10")), "that the head does not have"),
        (with_tensor(COVARIANCE, SMALL), "layer 1 has a query covariance of shape (5, 2, 8)"),
        (with_tensor(COVARIANCE, SQUARE[:1]), "covariance of shape (1, 8, 8)"),
        (with_tensor(COVARIANCE, SQUARE.astype(np.float64)), "is no table of float32"),
        (with_number(COVARIANCE, np.nan), "not finite"),
        (with_entry(COVARIANCE, (1, 2, 3), 0.7), "query covariance of layer 1 is not symmetric"),
        (with_entry(COVARIANCE, (1, 2, 2), 1e-2), "is not that of its query energies"),
        (with_pair(COVARIANCE, (1, 2, 3), 3.0), "the query covariance of layer 1 is no covariance"),
        (without("tokens"), "the tokens is missing"),
        (with_fact("tokens", "-1"), "the tokens is missing or damaged"),
        (with_fact("tokens", "9" * 5000), "the tokens is missing or damaged"),
        (with_fact("context", "many"), "the context is missing or damaged"),
        (with_fact("tool_version", "1\n\x1b[31m"), "the tool_version is missing or damaged"),
        (with_fact("text_digest", "0" * 63 + "\n"), "the text_digest is missing or damaged"),
    ],
)
def test_damaged_contents(
    tmp_path: Path, edit: Callable[[Tensors, dict[str, str]], None], says: str
) -> None:
    made, facts = tensors(), dict(FACTS)
    edit(made, facts)
    path = tmp_path / "damaged"
    save(made, path, facts)
    refused(path, says)


def refused(path: Path, *says: str) -> str:
    with pytest.raises(ModelFileError) as caught:
        read_calibration(path)
    sentence = str(caught.value)
    assert sentence.startswith(f"{path}: ")
    assert sentence.endswith("; make one with `tq-onnx calibrate`")
    assert "\n" not in sentence
    assert len(sentence) < 400 + len(str(path))
    for words in says:
        assert words in sentence
    return sentence


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 7,
        b"\0" * 8,
        b"text, nothing else\n" * 9,
        (2**63 - 1).to_bytes(8, "little") + b"{}",
        (90_000_000).to_bytes(8, "little") + b"{}" + b" " * 99,
        b"\2\0\0\0\0\0\0\0{}",
        b"\2\0\0\0\0\0\0\0{\xff",
        b"\x08\0\0\0\0\0\0\0[1, 2]  ",
    ],
)
def test_other_bytes(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(content)
    refused(path, "the file is not a calibration file")


@pytest.mark.parametrize("part", [0.01, 0.3, 0.6, 0.99])
def test_truncated(sound: Path, part: float) -> None:
    content = sound.read_bytes()
    sound.write_bytes(content[: int(part * len(content))])
    refused(sound, "the file is not a calibration file")


@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3", "BOOL", "F99"])
def test_other_element_types(sound: Path, dtype: str) -> None:
    content = sound.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    begin, end = header[MEAN]["data_offsets"]
    header[MEAN] |= {"dtype": dtype, "shape": [(end - begin) // (2 if dtype == "BF16" else 1)]}
    text = json.dumps(header).encode()
    sound.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])
    refused(sound, "the file is not a calibration file")


def test_what_is_no_file(tmp_path: Path) -> None:
    assert "there is no such file" in refused(tmp_path / "missing")
    refused(tmp_path, "the path is not a regular file")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # nobody writes: to open it would never end
    refused(pipe, "the path is not a regular file")
    link = tmp_path / "link"
    link.symlink_to("missing")
    refused(link, "there is no such file")
    refused(tmp_path / "missing" / ".." / "x" / "y", "there is no such file")


def test_too_large_is_not_read(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrationfile, "_LARGEST_FILE", 100)
    refused(sound, f"the file has {sound.stat().st_size} bytes")


def test_only_a_calibration_file_is_replaced(sound: Path, tmp_path: Path) -> None:
    found = read_calibration(sound)
    before = sound.read_bytes()
    changed = replace(found, tokens=641)
    with pytest.raises(OutputExistsError, match="give `overwrite=True` or another output"):
        write_calibration(sound, changed)
    assert sound.read_bytes() == before
    write_calibration(sound, changed, overwrite=True)
    assert read_calibration(sound).tokens == 641
    model = tmp_path / "model.onnx"
    model.write_bytes(b"precious")
    with pytest.raises(OutputExistsError, match="is no calibration file"):
        write_calibration(model, found, overwrite=True)
    weights = tmp_path / "weights.safetensors"
    save_file({"w": SMALL}, weights)
    with pytest.raises(OutputExistsError, match="is no calibration file"):
        check_target(weights, overwrite=True)
    assert model.read_bytes() == b"precious"
    assert len(list(tmp_path.iterdir())) == 3


def test_targets_that_are_no_files(sound: Path, tmp_path: Path) -> None:
    found = read_calibration(sound)
    folder, pipe, link = tmp_path / "folder", tmp_path / "pipe", tmp_path / "link"
    folder.mkdir()
    os.mkfifo(pipe)
    link.symlink_to(sound)
    beneath = sound / "x"
    for path, says in (
        (folder, "the output is a folder"),
        (pipe, "the output is no regular file"),
        (link, "the output is no regular file"),
        (beneath, "Not a directory"),
        (beneath / "y", "Not a directory"),
        (tmp_path / ("x" * 300), "too long"),
    ):
        with pytest.raises(TqOnnxError, match=says) as caught:
            write_calibration(path, found, overwrite=True)
        assert caught.value.exit_code == 4
    assert stat.S_ISFIFO(pipe.lstat().st_mode)
    assert sorted(tmp_path.iterdir()) == sorted([sound, folder, pipe, link])


@pytest.mark.parametrize("moment", ["write", "commit"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_nothing_half_written(
    sound: Path, monkeypatch: pytest.MonkeyPatch, moment: str, error: BaseException
) -> None:
    found = read_calibration(sound)
    before = sound.read_bytes()
    real = getattr(Transaction, moment)

    def fail(*arguments: object) -> None:
        if moment == "write":
            real(*arguments)
        raise error

    monkeypatch.setattr(Transaction, moment, fail)
    target = sound.parent / "new" / "file"
    for path in (target, sound):
        expected = ModelFileError if isinstance(error, OSError) else KeyboardInterrupt
        with pytest.raises(expected) as caught:
            write_calibration(path, found, overwrite=True)
        if isinstance(error, OSError):
            assert "the file cannot be written (No space left on device)" in str(caught.value)
    assert list(sound.parent.iterdir()) == [sound]
    assert sound.read_bytes() == before
