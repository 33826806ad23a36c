from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from tests.cli.run import run
from tests.decoders.running import FIXTURES
from tests.files.models import DYNAMO, GENAI, external, inline, point, snapshot
from tests.files.test_load import hugging_face_cache
from tests.integrations.genai_folder import genai_folder, write_config
from tests.recognise.dialects.test_gqa import RING
from tq_onnx.conversion import original as original_module
from tq_onnx.conversion import scales as adapt_module
from tq_onnx.conversion.equalise import LayerNorms, find_norms
from tq_onnx.conversion.options import Options
from tq_onnx.conversion.pipeline import convert
from tq_onnx.conversion.rewrite import ConvertPass
from tq_onnx.errors import (
    AlreadyConvertedError,
    ModelFileError,
    OutputExistsError,
    UnsupportedModelError,
    UsageError,
)
from tq_onnx.files import save as save_module
from tq_onnx.files import transaction as commit
from tq_onnx.files.load import load
from tq_onnx.graph.nomatch import NoMatch
from tq_onnx.integrations import folder as folder_module
from tq_onnx.integrations import folderconversion
from tq_onnx.integrations.folder import find_model, survey
from tq_onnx.integrations.folderconversion import convert_folder, default_output
from tq_onnx.integrations.folderinspection import inspect_folder
from tq_onnx.integrations.modelcard import CACHE_FIELD, MARK, ORIGINAL_README, README
from tq_onnx.plan import METADATA_PLAN, Plan
from tq_onnx.progress import Progress
from tq_onnx.recognise.match import Recognition, recognise
from tq_onnx.runtime.library import library_name
from tq_onnx.targets.registry import target_of

HADAMARD_9 = Options(seed=9, rotation="hadamard")


def embedding(folder: Path, name: str = "embedding.onnx", data: str | None = None) -> Path:
    """A model without caches, its table in a data file if one is named."""
    text = """<ir_version: 8, opset_import: ["" : 18]>
    embedding (int64[B, T] ids) => (float[B, T, 4] out)
    <float[2, 4] table = {0, 1, 2, 3, 4, 5, 6, 7}> { out = Gather(table, ids) }"""
    proto = onnx.parser.parse_model(text)
    if data is not None:
        tensor = proto.graph.initializer[0]
        raw = onnx.numpy_helper.to_array(tensor).tobytes()
        tensor.ClearField("float_data")
        point(tensor, data, 0, len(raw))
        (folder / data).write_bytes(raw)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(proto.SerializeToString())
    return folder / name


def hugging_face_folder(folder: Path) -> Path:
    """Two decoders that share their data in ``onnx``, an embedding, and the usual rest."""
    external(folder / "onnx", DYNAMO, data=("model.onnx_data", "model.onnx_data_1"))
    shutil.copyfile(folder / "onnx" / "model.onnx", folder / "onnx" / "model_q4.onnx")
    embedding(folder / "onnx", data="embed.onnx_data")
    for name in ("config.json", "generation_config.json", "tokenizer.json", "merges.txt"):
        (folder / name).write_text(f'{{"name": "{name}"}}')
    for name in ("model.safetensors", "stale.onnx.data", "onnx/other.onnx_data"):
        (folder / name).write_bytes(b"weights")
    for name in (".git/HEAD", ".cache/huggingface/x.metadata", "a.lock", "__pycache__/x.pyc"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("a tool's")
    return folder


def test_a_pair_of_graphs_gets_the_same_scales_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "pair"
    source.mkdir()
    for name in ("decode", "prefill"):
        shutil.copyfile(FIXTURES / f"hf-{name}.onnx", source / f"{name}.onnx")
    (source / "config.json").write_text("{}")
    monkeypatch.setattr(LayerNorms, "scales", np.full(16, 2, np.float32))
    report = convert_folder(source, tmp_path / "alike")
    plans = [decoder.plan for decoder in report.decoders]
    assert [layer.equalised for plan in plans for layer in plan.layers] == [True] * 4
    assert plans[0].unlike(plans[1]) is None

    def found_in_one(model: ir.Model, plan: Plan) -> tuple[LayerNorms | NoMatch, ...]:
        if plan.layers[0].key.past is None:
            return tuple(NoMatch("none") for layer in plan.layers)
        return find_norms(model, plan)

    monkeypatch.setattr(adapt_module, "find_norms", found_in_one)
    with pytest.raises(UsageError, match=r"layer 0 of prefill.onnx and decode.onnx") as error:
        convert_folder(source, tmp_path / "other")
    assert "`equalize=False`" in str(error.value)
    assert not (tmp_path / "other").exists()
    convert_folder(source, tmp_path / "plain", options=Options(equalize=False))


def is_converted(path: Path) -> bool:
    return METADATA_PLAN in load(path).model.metadata_props


def test_a_folder_of_genai(tmp_path: Path) -> None:
    source = genai_folder(tmp_path / "qwen3")
    before = snapshot(tmp_path)
    report = convert_folder(source, default_output(source, "int4"))
    out = tmp_path / "qwen3-int4"
    assert report.output == out
    assert set(snapshot(out)) == {*snapshot(source), library_name(), README}
    assert is_converted(out / "model.onnx")
    assert not (out / library_name()).is_symlink()
    same = ("model.onnx.data", "tokenizer.json", "chat_template.jinja")
    assert all(snapshot(out)[name] == snapshot(source)[name] for name in same)
    config = json.loads((out / "genai_config.json").read_text())
    assert config["model"]["decoder"]["filename"] == "model.onnx"
    assert config["model"]["decoder"]["session_options"]["custom_ops_library"] == library_name()
    assert config["model"]["decoder"]["head_size"] == 34
    files = [path for path in out.iterdir() if path.is_file()]
    assert report.bytes_written == sum(path.stat().st_size for path in files)
    after = snapshot(tmp_path)
    assert all(after[name] == digest for name, digest in before.items())


@pytest.mark.parametrize("preset", ["k5v3", "k8v4"])
def test_genai_gets_keys_and_values_of_one_width(tmp_path: Path, preset: str) -> None:
    source = genai_folder(tmp_path / "qwen3")
    report = convert_folder(source, tmp_path / "out", preset=preset, options=Options(layers="1"))
    layers = report.decoders[0].plan.layers
    width = {"k5v3": 42, "k8v4": 64}[preset]
    assert [(layer.key.row_bytes, layer.value.row_bytes) for layer in layers] == [
        (256, 256),
        (width, width),
    ]
    assert report.genai is not None
    assert report.genai.several_widths
    assert report.genai.padding == 2 * (width - {"k5v3": 26, "k8v4": 36}[preset])
    # Without the configuration there is nothing to be wider for.
    (source / "genai_config.json").unlink()
    report = convert_folder(source, tmp_path / "plain", preset=preset)
    assert {
        layer.key.row_bytes == layer.value.row_bytes for layer in report.decoders[0].plan.layers
    } == {False}


def test_the_same_as_file_by_file(tmp_path: Path) -> None:
    source = genai_folder(tmp_path / "in")
    options = replace(HADAMARD_9, residual_length=8, sink_tokens=1, spare_rows=True)
    convert_folder(source, tmp_path / "out", preset="int3", options=options)
    convert(source / "model.onnx", tmp_path / "m" / "m.onnx", preset="int3", options=options)
    one, other = tmp_path / "out" / "model.onnx", tmp_path / "m" / "m.onnx"
    assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("mode", ["copy", "link"])
def test_a_folder_of_hugging_face(tmp_path: Path, mode: str) -> None:
    source = hugging_face_folder(tmp_path / "in")
    calls: list[Progress] = []
    report = convert_folder(
        source,
        tmp_path / "out",
        external_data=mode,  # type: ignore[arg-type]
        on_progress=calls.append,
    )
    out = tmp_path / "out"
    files = {name for name, what in snapshot(out).items() if what != "folder"}
    data = {f"onnx/{name}" for name in ("model.onnx_data", "model.onnx_data_1", "embed.onnx_data")}
    rest = {"config.json", "generation_config.json", "tokenizer.json", "merges.txt"}
    models = {"onnx/model.onnx", "onnx/model_q4.onnx"}
    assert files == {*data, *rest, *models, "onnx/embedding.onnx", README}
    assert all(is_converted(out / name) for name in models)
    assert {d.output for d in report.decoders} == {out / name for name in models}
    assert len({d.plan for d in report.decoders}) == 1
    same = {*data, *rest, "onnx/embedding.onnx"} - {"config.json"}
    assert all(snapshot(out)[name] == snapshot(source)[name] for name in same)
    shared = [(out / name).samefile(source / name) for name in data]
    assert shared == [mode == "link"] * 3
    assert not (out / "config.json").samefile(source / "config.json")
    assert {entry.name for entry in report.left_out} == {
        "model.safetensors",
        "stale.onnx.data",
        "onnx/other.onnx_data",
    }
    assert [call for call in calls if call.doing.startswith("Looking")] == [
        Progress(f"Looking at {name}") for name in sorted({*models, "onnx/embedding.onnx"})
    ]
    assert calls[-1].doing == "Copying files"
    assert calls[-1].done == (calls[-1].total or 0) > 0
    assert report.genai is None
    assert report.external_data == mode
    # What is left out does not matter: the folder stands alone.
    if mode == "copy":
        shutil.rmtree(source)
        onnx.checker.check_model(str(out / "onnx" / "model.onnx"))


def test_the_hugging_face_cache(tmp_path: Path) -> None:
    model = hugging_face_cache(tmp_path)
    revision, blobs = model.parent.parent, model.parent.parent.parent.parent / "blobs"
    (blobs / "t").write_text("{}")
    (revision / "tokenizer.json").symlink_to(Path("../../blobs/t"))
    convert_folder(revision, tmp_path / "out")
    files = {name for name, what in snapshot(tmp_path / "out").items() if what != "folder"}
    assert files == {"onnx/model.onnx", "onnx/model.onnx_data", "tokenizer.json", README}
    owner = revision.parent.parent.name.replace("models--", "").replace("--", "/")
    assert f'base_model: "{owner}"' in (tmp_path / "out" / README).read_text()
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))
    with pytest.raises(UsageError, match="snapshots"):
        survey(blobs.parent)
    secret = tmp_path / "secret"
    secret.write_text("password")
    (revision / "notes.txt").symlink_to(secret)
    with pytest.raises(ModelFileError, match=r"notes\.txt: is a link that leaves the folder"):
        convert_folder(revision, tmp_path / "out2")
    assert not (tmp_path / "out2").exists()


def test_a_readme_that_people_wrote_is_kept(tmp_path: Path) -> None:
    source, out = hugging_face_folder(tmp_path / "in"), tmp_path / "out"
    theirs = "---\nlicense: mit\n---\nThe base model.\n"
    (source / README).write_text(theirs)
    convert_folder(source, out)
    assert (source / README).read_text() == theirs
    assert (out / ORIGINAL_README).read_text() == theirs
    card = (out / README).read_text()
    assert MARK in card
    assert 'license: "mit"' in card
    assert 'InferenceSession("onnx/model.onnx"' in card
    convert_folder(source, out, preset="int3", overwrite=True)
    assert "`int3`" in (out / README).read_text()
    (out / README).write_text("Mine.\n")
    convert_folder(source, out, overwrite=True)
    assert (out / README).read_text() == "Mine.\n"
    (source / "config.json").write_text("[1]")  # no configuration of a model
    convert_folder(source, tmp_path / "list")
    assert (tmp_path / "list" / "config.json").read_text() == "[1]"


def test_sizes_are_compared_with_rings_as_far_as_they_can(tmp_path: Path) -> None:
    for rings, told in (
        ((0, 1), "| 272; the original's windows take 6,144 bytes at any length |"),
        ((1,), "| 272, 3.76 times fewer than before; the original's windows take 3,072 bytes at"),
    ):
        source, out = genai_folder(tmp_path / f"in{len(rings)}"), tmp_path / f"out{len(rings)}"
        proto = onnx.load(source / "model.onnx", load_external_data=False)
        nodes = [node for node in proto.graph.node if node.op_type == "GroupQueryAttention"]
        for layer in rings:
            attributes = nodes[layer].attribute
            del attributes[[entry.name for entry in attributes].index("local_window_size")]
            for name, value in RING.items():
                attributes.add(name=name, type=onnx.AttributeProto.INT, i=value)
        (source / "model.onnx").write_bytes(proto.SerializeToString())
        shown = run("inspect", source).out
        assert ("0.00" in shown, "(now)" in shown) == (False, True)
        convert_folder(source, out)
        assert told in (out / README).read_text()


def test_links(tmp_path: Path) -> None:
    source = genai_folder(tmp_path / "in")
    (source / "same.json").symlink_to("tokenizer.json")
    (source / "elsewhere").symlink_to(tmp_path, target_is_directory=True)
    os.mkfifo(source / "pipe")
    report = convert_folder(source, tmp_path / "out")
    assert not (tmp_path / "out" / "same.json").is_symlink()
    assert (tmp_path / "out" / "same.json").read_text() == '{"a tokenizer": 1}'
    left = {entry.name: entry.reason for entry in report.left_out}
    assert left == {"elsewhere": "a link to a folder", "pipe": "not a regular file"}
    (source / "gone").symlink_to("nowhere")
    with pytest.raises(ModelFileError, match="link to a file that is missing"):
        survey(source)


def broken(path: Path) -> None:
    """Makes attention something that no dialect knows."""
    proto = onnx.load(path, load_external_data=False)
    for node in proto.graph.node:
        if node.op_type in ("Softmax", "GroupQueryAttention"):
            node.op_type = f"Log{node.op_type}"
    path.write_bytes(proto.SerializeToString())


def test_a_refused_decoder_is_left_out_with_its_reason(tmp_path: Path) -> None:
    source = hugging_face_folder(tmp_path / "in")
    broken(source / "onnx" / "model_q4.onnx")

    assert inspect_folder(source).convertible
    report = convert_folder(source, tmp_path / "out")

    left = {entry.name: entry.reason for entry in report.left_out}
    assert left["onnx/model_q4.onnx"].startswith("layer 0")
    assert not (tmp_path / "out" / "onnx" / "model_q4.onnx").exists()
    assert report.decoders
    for name in report.data:
        assert (tmp_path / "out" / name).exists()


def test_a_folder_of_refused_decoders_is_refused(tmp_path: Path) -> None:
    source = hugging_face_folder(tmp_path / "in")
    for path in (source / "onnx").glob("model*.onnx"):
        broken(path)
    before = snapshot(tmp_path)

    assert not inspect_folder(source).convertible
    with pytest.raises(UnsupportedModelError, match=r"model.*\.onnx: layer 0"):
        convert_folder(source, tmp_path / "out")
    assert snapshot(tmp_path) == before


def test_a_refused_decoder_refuses_a_folder_of_genai(tmp_path: Path) -> None:
    source = genai_folder(tmp_path / "in")
    broken(source / "model.onnx")
    with pytest.raises(UnsupportedModelError, match=r"model\.onnx: "):
        convert_folder(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_images_are_not_caches(tmp_path: Path) -> None:
    source = hugging_face_folder(tmp_path / "in")
    text = """<ir_version: 8, opset_import: ["" : 18]>
    vision (float[B, 3, H, W] pixels) => (float[B, 3, H, W] features) {
        features = Relu(pixels)
    }"""
    (source / "vision.onnx").write_bytes(onnx.parser.parse_model(text).SerializeToString())
    report = convert_folder(source, tmp_path / "out")
    assert {"vision.onnx", "onnx/embedding.onnx"} <= set(report.carried)
    decoder = text.replace(
        ", W] features)", ", W] features, float[B, 3, H, W] more, float[B, 3, H] logits)"
    ).replace("Relu(pixels)", "Relu(pixels) more = Neg(pixels) logits = ReduceMax(pixels)")
    (source / "vision.onnx").write_bytes(onnx.parser.parse_model(decoder).SerializeToString())
    report = convert_folder(source, tmp_path / "out2")
    left = {entry.name: entry.reason for entry in report.left_out}
    assert left["vision.onnx"].startswith("layer 0")


def test_no_decoder(tmp_path: Path) -> None:
    embedding(tmp_path / "e")
    with pytest.raises(UnsupportedModelError, match=r"embedding\.onnx: the model has no attention"):
        convert_folder(tmp_path / "e", tmp_path / "out")
    (tmp_path / "s").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "s" / name).write_text("{}")
    with pytest.raises(ModelFileError, match=r"config\.json, model\.safetensors"):
        convert_folder(tmp_path / "s", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelFileError, match="no files"):
        convert_folder(tmp_path / "empty", tmp_path / "out")


def test_what_is_converted_already(tmp_path: Path) -> None:
    source = genai_folder(tmp_path / "in")
    convert_folder(source, tmp_path / "out")
    with pytest.raises(AlreadyConvertedError, match="original folder"):
        convert_folder(tmp_path / "out", tmp_path / "again")
    # Beside its original, a converted file is no part of the folder.
    convert(source / "model.onnx", source / "model.int4.onnx")
    report = convert_folder(source, tmp_path / "out2")
    assert not (tmp_path / "out2" / "model.int4.onnx").exists()
    assert [entry.name for entry in report.left_out] == ["model.int4.onnx"]


def test_a_model_that_the_configuration_names_must_be_there(tmp_path: Path) -> None:
    source = genai_folder(tmp_path / "in")
    (source / "model.onnx").rename(source / "decoder.onnx")
    with pytest.raises(ModelFileError, match=r"names model\.onnx, which is not in the folder"):
        convert_folder(source, tmp_path / "out")


def test_other_models_of_the_configuration_go_along(tmp_path: Path) -> None:
    source = genai_folder(tmp_path / "in")
    embedding(source, "vision.onnx", data="vision.onnx.data")
    path = source / "genai_config.json"
    document = json.loads(path.read_text())
    document["model"]["vision"] = {"filename": "vision.onnx"}
    path.write_text(json.dumps(document))
    report = convert_folder(source, tmp_path / "out")
    assert "vision.onnx" in report.carried
    assert snapshot(tmp_path / "out")["vision.onnx"] == snapshot(source)["vision.onnx"]
    assert set(report.data) == {"model.onnx.data", "vision.onnx.data"}


def test_what_exists_stays(tmp_path: Path) -> None:
    source = genai_folder(tmp_path / "in")
    out = tmp_path / "out"
    out.mkdir()
    (out / "model.onnx").write_text("precious")
    (out / "notes.txt").write_text("mine")
    before = snapshot(out)
    with pytest.raises(OutputExistsError, match="`overwrite=True`"):
        convert_folder(source, out)
    assert snapshot(out) == before
    convert_folder(source, out, overwrite=True)
    assert is_converted(out / "model.onnx")
    assert (out / "notes.txt").read_text() == "mine"
    (tmp_path / "file").write_text("x")
    with pytest.raises(ModelFileError, match="not a folder"):
        convert_folder(source, tmp_path / "file", overwrite=True)


OF_ANOTHER = (
    "added_tokens.json",
    "merges.txt",
    "onnx/decoder.onnx",
    "spiece.model",
    "genai_config.json",
)


@pytest.mark.parametrize("left", [*OF_ANOTHER, "onnx/model_q4.onnx"])
def test_no_file_of_another_model_stays_where_a_runtime_reads_it(left: str, tmp_path: Path) -> None:
    """Neither one that the original has not, nor one whose conversion is refused."""
    source, out = hugging_face_folder(tmp_path / "in"), tmp_path / "out"
    (source / "merges.txt").unlink()
    convert_folder(source, out)
    broken(source / "onnx" / "model_q4.onnx")
    (out / left).write_text("another model's")
    (out / "weights.bin").write_text("read by nobody")
    before = snapshot(out)
    with pytest.raises(
        OutputExistsError, match=rf"may read beside the new ones \({left}\); remove"
    ):
        convert_folder(source, out, preset="int3", overwrite=True)
    assert snapshot(out) == before
    (out / left).unlink()
    (out / "onnx" / "model_q4.onnx").unlink(missing_ok=True)
    convert_folder(source, out, preset="int3", overwrite=True)
    assert find_model(out) == out / "onnx" / "model.onnx"
    assert (out / "weights.bin").exists()


def test_an_empty_folder_is_no_obstacle(tmp_path: Path) -> None:
    source = genai_folder(tmp_path / "in")
    (tmp_path / "out").mkdir()
    assert is_converted(convert_folder(source, tmp_path / "out").decoders[0].output)


def test_the_original_is_never_the_output(tmp_path: Path) -> None:
    source = genai_folder(tmp_path / "in")
    (tmp_path / "link").symlink_to(source)
    before = snapshot(tmp_path)
    for output in (source, source / "out", tmp_path, tmp_path / "link", source / ".." / "in"):
        with pytest.raises(ModelFileError, match="overlaps"):
            convert_folder(source, output, overwrite=True)
    assert snapshot(tmp_path) == before


def test_data_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    source = genai_folder(tmp_path / "in")
    out = tmp_path / "out"
    first = convert_folder(source, out)
    data = (out / "model.onnx.data").stat()
    second = convert_folder(source, out, preset="int3", overwrite=True)
    assert (out / "model.onnx.data").stat().st_ino == data.st_ino
    assert second.bytes_written < first.bytes_written - data.st_size


def test_room_is_looked_for_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = genai_folder(tmp_path / "in")
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(save_module.shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(folderconversion.pipeline, "prepare", lambda *_, **__: 1 / 0)
    with pytest.raises(ModelFileError, match="1000 are free"):
        convert_folder(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("error", [OSError(28, "No space left"), KeyboardInterrupt()])
def test_a_failure_anywhere_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, overwrite: bool
) -> None:
    source = genai_folder(tmp_path / "in")
    out = tmp_path / "out"
    if overwrite:
        convert_folder(source, out, preset="int2")
        for name in snapshot(out):
            with (out / name).open("ab") as file:
                file.write(b"old")
    before = snapshot(tmp_path)
    prepared = folderconversion.pipeline.prepare(source / "model.onnx")
    monkeypatch.setattr(folderconversion.pipeline, "prepare", lambda *_, **__: prepared)
    failures = 0
    real = os.fsync
    for at in range(1, 60):
        calls = 0

        def fail(descriptor: int, at: int = at) -> None:
            nonlocal calls
            calls += 1
            if calls == at:
                raise error
            real(descriptor)

        with monkeypatch.context() as patch:
            patch.setattr(commit.os, "fsync", fail)
            try:
                convert_folder(source, out, overwrite=overwrite)
            except (ModelFileError, KeyboardInterrupt):
                failures += 1
                assert snapshot(tmp_path) == before, at
                continue
        break
    assert failures >= 6  # models, data, configurations, library and the folder itself
    assert is_converted(out / "model.onnx")


def test_the_default_output_is_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m").mkdir()
    assert default_output(tmp_path / "m", "int3") == tmp_path / "m-int3"
    monkeypatch.chdir(tmp_path / "m")
    assert default_output(Path(), "int3") == tmp_path / "m-int3"


def test_which_model_is_meant(tmp_path: Path) -> None:
    source = genai_folder(tmp_path / "g")
    assert find_model(source) == source / "model.onnx"
    assert find_model(source / "model.onnx") == source / "model.onnx"
    assert find_model(tmp_path / "nothing") == tmp_path / "nothing"
    hugging_face = hugging_face_folder(tmp_path / "h")
    assert find_model(hugging_face) == hugging_face / "onnx" / "model.onnx"
    one = inline(tmp_path / "o", name="strange.onnx")
    assert find_model(tmp_path / "o") == one
    inline(tmp_path / "o", name="second.onnx")
    with pytest.raises(UsageError, match=r"second\.onnx, strange\.onnx"):
        find_model(tmp_path / "o")
    (tmp_path / "e").mkdir()
    with pytest.raises(ModelFileError, match="no ONNX file"):
        find_model(tmp_path / "e")


def test_a_second_library_is_refused(tmp_path: Path) -> None:
    source = genai_folder(tmp_path / "in")
    (source / library_name()).write_text("mine")
    with pytest.raises(ModelFileError, match="the name of the operator library"):
        convert_folder(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_configuration_without_room_is_refused_by_both(tmp_path: Path) -> None:
    source = genai_folder(tmp_path / "in")
    document = json.loads((source / "genai_config.json").read_text())
    document["model"]["decoder"]["session_options"]["custom_ops_library"] = "mine.so"
    write_config(source, document)
    for command in (inspect_folder, lambda folder: convert_folder(folder, tmp_path / "out")):
        with pytest.raises(UnsupportedModelError, match=r"mine\.so"):
            command(source)


def test_survey_names_the_roles(tmp_path: Path) -> None:
    found = survey(hugging_face_folder(tmp_path / "in"))
    assert {model.name: model.role for model in found.models} == {
        "onnx/embedding.onnx": "other",
        "onnx/model.onnx": "decoder",
        "onnx/model_q4.onnx": "decoder",
    }
    assert GENAI not in found.companions


def test_every_model_of_a_folder_is_recognised_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def counting(model: ir.Model) -> Recognition:
        seen.append(str(model.graph.name))
        return recognise(model)

    monkeypatch.setattr(original_module, "recognise", counting)
    source = hugging_face_folder(tmp_path / "in")
    convert_folder(source, tmp_path / "out")
    assert len(seen) == 3
    report = inspect_folder(source)
    assert len(seen) == 6
    assert all(model.report.equalisation for model in report.of_role("decoder"))
    # Without room in memory, decoders are read again.
    monkeypatch.setattr(folder_module, "_MOST_KEPT", 0)
    convert_folder(source, tmp_path / "again")
    assert len(seen) == 11
    assert snapshot(tmp_path / "again") == snapshot(tmp_path / "out")


def test_a_survey_does_not_convert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ConvertPass, "call", lambda *_: pytest.fail("it converts"))
    found = survey(hugging_face_folder(tmp_path / "in"), to_convert=True)
    assert {*found.originals} == {"onnx/model.onnx", "onnx/model_q4.onnx"}
    assert all(not model.report.equalisation for model in found.models)


def test_a_folder_for_transformers_js_keeps_its_layout(tmp_path: Path) -> None:
    source = tmp_path / "qwen3"
    source.mkdir()
    inline(source / "onnx", DYNAMO)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (source / name).write_text("{}")
    report = convert_folder(source, tmp_path / "web", target=target_of("web"))
    assert set(snapshot(report.output)) == {*snapshot(source), README}
    card = (report.output / README).read_text()
    assert 'AutoModelForCausalLM.from_pretrained("web", {' in card
    block = json.loads((report.output / "config.json").read_text())[CACHE_FIELD]
    assert (block["quant_method"], block["preset"], block["target"]) == (
        *("turboquant", "int4", "web"),
    )
    assert is_converted(report.output / "onnx" / "model.onnx")
