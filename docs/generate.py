"""Render the generated blocks of README.md and docs/*.md, and docs/schemas, from the product.

A block stands between ``<!-- generated: NAME -->`` and ``<!-- end generated -->``. Its text comes
from the function of ``BLOCKS`` with that name, so that no table of the documentation repeats by
hand what the code declares.

    python docs/generate.py            write the blocks
    python docs/generate.py --check    exit 1 and name the files whose blocks differ

Both exit with 1 where a command, an operator or a block has no place in the documents.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

import click
import measured
import schemas

import tq_onnx
from tq_onnx.ascend.features import TABLE as CANN_FEATURES
from tq_onnx.cli.grouped import ALL
from tq_onnx.cli.main import COMMANDS, main
from tq_onnx.codec.kind import NORM_KEPT, NOT_CORRECTED, UNBIASED
from tq_onnx.codec.presets import DEFAULT_PRESET, LISTED_PRESETS, PRESETS, Preset
from tq_onnx.codec.spec import CODECS, KINDS, Codec, Field, plane_widths, row_layout
from tq_onnx.conversion.capabilities import Capabilities, words
from tq_onnx.ops.domain import BODY_OPSET
from tq_onnx.ops.features import FEATURES
from tq_onnx.ops.operator import FLOAT32, FLOATS, Attribute, Parameter
from tq_onnx.ops.operators import BY_NAME
from tq_onnx.recognise.match import MIN_OPSET
from tq_onnx.runtime.variables import VARIABLES
from tq_onnx.targets.registry import TARGETS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT: Final = Path(__file__).resolve().parents[1]
QUALITY: Final = ROOT / "docs"
CANN_REQUIREMENTS: Final = ROOT / "custom_ops" / "cann" / "testing" / "requirements.txt"
HALF_BITS: Final = 16
HEAD_SIZES: Final = (64, 128)

_BLOCK: Final = re.compile(
    r"(?P<begin>^<!-- generated: (?P<name>[^\n]+?) -->\n)(?P<text>.*?)"
    r"(?P<end>^<!-- end generated -->$)",
    re.DOTALL | re.MULTILINE,
)
_MARKER: Final = re.compile(r"^<!-- (?:generated: .*|end generated) -->$", re.MULTILINE)


def documents() -> list[Path]:
    """Return the files that may have blocks: README.md and the pages of docs."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def render(text: str) -> str:
    """Return a document with all of its blocks rendered anew.

    Raises:
        ValueError: a marker is without its partner, or no block has such a name.
    """
    markers = len(_MARKER.findall(text))
    blocks = list(_BLOCK.finditer(text))
    if markers != 2 * len(blocks):
        raise ValueError(f"{markers} markers do not make {len(blocks)} blocks")

    def rendered(block: re.Match[str]) -> str:
        name, _, argument = block["name"].partition(" ")
        if name not in BLOCKS:
            raise ValueError(f"there is no block {name!r}, only {', '.join(BLOCKS)}")
        body = BLOCKS[name](argument) if argument else BLOCKS[name]()
        return f"{block['begin']}{body}\n{block['end']}"

    return _BLOCK.sub(rendered, text)


def missing(text: str) -> Iterator[str]:
    """Yield what the documents lack, a sentence each.

    Args:
        text: all documents, one behind the other.
    """
    headings = r"^## tq-onnx (\S+)\n\n<!-- generated: help \1 -->$"
    operators = r"^<!-- generated: operator (\w+) -->$"
    for page, pattern, names, block in (
        ("docs/commands.md", headings, list(COMMANDS), "## tq-onnx {0}` over the block `help {0}"),
        ("docs/operators.md", operators, list(BY_NAME), "<!-- generated: operator {0} -->"),
    ):
        blocks = re.findall(pattern, text, re.MULTILINE)
        yield from (
            f"{page}: there is no `{block.format(name)}`" for name in names if name not in blocks
        )
        if sorted(blocks) == sorted(names) and blocks != names:
            yield f"{page}: the order has to be {', '.join(names)}"
    used = {block["name"].partition(" ")[0] for block in _BLOCK.finditer(text)}
    yield from (f"no document has the block {name}" for name in BLOCKS if name not in used)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table; a column whose head begins with ``>`` is aligned to the right."""
    lines = [
        [title.removeprefix(">") for title in head],
        ["---:" if title.startswith(">") else "---" for title in head],
        *([str(cell).replace("|", r"\|") for cell in row] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)


def _presets() -> str:
    return table(
        ("preset", "keys", "values", "rotation", ">bytes", ">smaller than float16", "from"),
        map(_preset, LISTED_PRESETS),
    )


_CHOICES: Final = {
    "int4": "`int4` (default)",
    "int5": "`int5`",
    "int4, calibrated": "`int4`, calibrated",
    "int5, calibrated": "`int5`, calibrated",
    "int3, calibrated": "`int3`, calibrated",
    "int2, calibrated": "`int2`, calibrated",
    "k8v4": "`k8v4`, as in vLLM",
    "mse4": "`mse4`, the TurboQuant paper's Algorithm 1",
    "ORT int4": "ONNX Runtime int4, best scales for this text",
    "ORT int8": "ONNX Runtime int8, best scales for this text",
}
"""The rows of README.md: names in the documents of quality, and how README.md calls them."""


def _choices() -> str:
    """Return what the presets that most people choose cost in bytes and quality."""
    measured_together = _quality("smollm2")
    figures = {
        entry["name"]: entry
        for entry in (*measured_together["models"], *measured_together.get("peers", ()))
    }
    original = 2 * HEAD_SIZES[-1] * HALF_BITS // 8

    def row(name: str, title: str) -> tuple[str, ...]:
        entry = figures[name]
        size = round(entry["bits_per_value"] * 2 * HEAD_SIZES[-1] / 8)
        if entry["preset"] is not None:
            size = _bytes(PRESETS[entry["preset"]])
        change, kl = _loss(entry)
        error = 100 * entry["quality"]["perplexity_change_error"]
        return (
            title,
            str(size),
            f"{original / size:.2f}x",
            change.replace(" ", f" ± {error:.1f} "),
            kl,
        )

    return table(
        ("cache", ">bytes", ">smaller than float16", ">perplexity", ">mean KL, nats"),
        (row(name, title) for name, title in _CHOICES.items()),
    )


def _models_quality() -> str:
    """Return what presets lose on several models without a calibration, measured in one way."""
    return table(
        (
            "model",
            "preset",
            ">perplexity",
            ">change",
            ">mean KL, nats",
            ">KL p99",
            ">same top token",
        ),
        (
            (
                model,
                f"`{name}`",
                f"{entry['converted_perplexity']:.2f}",
                f"{100 * entry['perplexity_change']:+.1f} "
                f"± {100 * entry['perplexity_change_error']:.1f} %",
                f"{entry['kl_mean']:.4f} ± {entry['kl_error']:.4f}",
                f"{entry['kl_p99']:.4f}",
                f"{100 * entry['top1_agreement']:.1f} %",
            )
            for model, figures in _quality("models").items()
            for name, entry in figures["caches"].items()
        ),
    )


def _generator_quality() -> str:
    """Return what a folder with int4 weights loses, read by onnxruntime-genai's Generator."""
    figures = json.loads((QUALITY / "quality-genai.json").read_text(encoding="utf-8"))
    return table(
        ("preset", ">default: perplexity", ">KL, nats", ">growing caches: perplexity", ">KL, nats"),
        [
            (
                f"`{name}`".replace(", calibrated`", "`, calibrated"),
                *_loss({"quality": entry}),
                *_loss({"quality": figures["growing"][name]}),
            )
            for name, entry in figures["shared"].items()
        ],
    )


def _pages_quality() -> str:
    """Return what a folder with int4 weights loses in pages, and beside it without pages."""
    figures = json.loads((QUALITY / "quality-pages.json").read_text(encoding="utf-8"))

    def row(name: str) -> Iterator[str]:
        preset, _, suffix = name.partition(", ")
        yield f"`{preset}`{suffix and f', {suffix}'}"
        for length in ("1024", "4096"):
            for form in ("pages", "rows"):
                entry = figures[length][form].get(name)
                yield from ("", "") if entry is None else _loss({"quality": entry})

    heads = ("pages: perplexity", "KL, nats", "no pages: perplexity", "KL, nats")
    return table(
        ("preset", *(f">{head}" for head in heads * 2)), map(row, figures["1024"]["pages"])
    )


def _long_quality() -> str:
    """Return the loss over one text of 32,768 tokens, and by 4,096 positions."""
    models = _quality("smollm2-32768")["models"]
    ends = range(4096, 32769, 4096)

    def means(entry: Any) -> list[str]:
        stretches = entry["quality"]["kl_by_position"]
        return [f"{sum(stretches[end // 1024 - 4 : end // 1024]) / 4:.4f}" for end in ends]

    return table(
        ("preset", ">perplexity", ">KL, nats", *(f">to {end:,}" for end in ends)),
        [
            (
                f"`{entry['name']}`".replace(", calibrated`", "`, calibrated"),
                *_loss(entry),
                *means(entry),
            )
            for entry in models
        ],
    )


def _loss(entry: Any) -> tuple[str, str]:
    """Return the change of the perplexity and the mean KL divergence of a model."""
    quality = entry["quality"]
    change = f"{round(100 * quality['perplexity_change'], 1) + 0.0:+.1f} %"
    return change, f"{quality['kl_mean']:.4f}"


def _quality(name: str) -> Any:
    return json.loads((QUALITY / f"quality-{name}.json").read_text(encoding="utf-8"))


def _bytes(preset: Preset) -> int:
    """Return the bytes of a token's key and value in one KV head of the largest size."""
    codecs = [codec.for_elements(HALF_BITS) for codec in (preset.key, preset.value)]
    return sum(row_layout(codec, HEAD_SIZES[-1]).row_bytes for codec in codecs)


def _preset(preset: Preset) -> tuple[str, ...]:
    codecs = [codec.for_elements(HALF_BITS) for codec in (preset.key, preset.value)]
    size = _bytes(preset)
    original = 2 * HEAD_SIZES[-1] * HALF_BITS // 8
    return (
        f"`{preset.name}`" + (" (default)" if preset.name == DEFAULT_PRESET else ""),
        *(_codec(codec, preset) for codec in codecs),
        _rotation(preset),
        str(size),
        f"{original / size:.2f}x",
        preset.source + ("; experimental" if preset.experimental else ""),
    )


def _rotation(preset: Preset) -> str:
    rotated = [codec.is_rotated for codec in (preset.key, preset.value)]
    only = {(True, False): " (keys)", (False, True): " (values)"}
    return preset.rotation + only.get((rotated[0], rotated[1]), "")


def _codec(codec: Codec, preset: Preset) -> str:
    if codec.is_raw:
        return "as in the model"
    if not codec.corrects_norm:
        return str(codec)
    gains = f", {preset.gains} gains" if preset.gains and codec.searches else ""
    corrected = {NOT_CORRECTED: "", NORM_KEPT: " nc", UNBIASED: " ub"}[preset.norm_correction]
    return f"{codec}{corrected}{gains}"


def _rows() -> str:
    def row(codec: Codec) -> tuple[object, ...]:
        layouts = [row_layout(codec, head_size) for head_size in HEAD_SIZES]
        planes = " + ".join(map(str, plane_widths(codec)))
        fields = "; ".join(map(_field, layouts[0].fields))
        sizes = [layout.row_bytes for layout in layouts]
        return (
            f"`{codec.kind}`",
            codec.bits,
            planes or "none: the elements",
            fields or "none",
            *sizes,
        )

    sizes = [f">bytes, D = {head_size}" for head_size in HEAD_SIZES]
    return table(
        ("codec", ">bits", "planes, bits", "fields", *sizes),
        map(row, CODECS),
    )


def _field(field: Field) -> str:
    each = f" for each {HEAD_SIZES[0] // field.count} coordinates" if field.count > 1 else ""
    return f"{field.name.replace('_', ' ')}{each}, float{8 * field.size}"


def _operator(name: str) -> str:
    if name not in BY_NAME:
        raise ValueError(f"there is no operator {name!r}, only {', '.join(BY_NAME)}")
    operator = BY_NAME[name]
    inputs = table(
        (">slot", "input", "type", "meaning"),
        (
            (slot.slot, f"`{slot.name}`", _element(slot), _prose(slot.meaning))
            for slot in operator.inputs
        ),
    )
    outputs = table(
        ("output", "type", "meaning"),
        ((f"`{slot.name}`", _element(slot), _prose(slot.meaning)) for slot in operator.outputs),
    )
    attributes = table(
        ("attribute", "type", "meaning"),
        (
            (f"`{attribute.name}`", _kind(attribute), _prose(attribute.meaning))
            for attribute in operator.attributes
        ),
    )
    return "\n\n".join([inputs, outputs, attributes][: 3 if operator.attributes else 2])


def _element(parameter: Parameter) -> str:
    name = {FLOATS: "float", FLOAT32: "float32"}.get(
        parameter.element, parameter.element.removeprefix("tensor(").removesuffix(")")
    )
    return f"{name}, optional" if parameter.is_optional else name


def _kind(attribute: Attribute) -> str:
    kind = attribute.kind.name.lower()
    return kind if attribute.default is None else f"{kind}, default {attribute.default}"


def _prose(meaning: str) -> str:
    """Put the shapes and subscripts of a record's text into backticks."""
    return re.sub(r"(?:\b\w+)?\[[^]]*\]", lambda match: f"`{match[0]}`", meaning)


def _commands() -> str:
    return table(
        ("command", "purpose"),
        ((f"`{usage(name)}`", summary) for name, summary in COMMANDS.items()),
    )


def _help(name: str) -> str:
    command, context = _command(name)
    context.terminal_width = context.max_content_width = 80
    context.meta[ALL] = True
    return f"```text\n{command.get_help(context).rstrip()}\n```"


def usage(name: str) -> str:
    """Return a command with its arguments and its required options, as a user types it."""
    command, context = _command(name)
    words = ["tq-onnx", name]
    for parameter in command.params:
        if isinstance(parameter, click.Argument):
            words.append(parameter.make_metavar(context))
        elif parameter.required:
            words += [parameter.opts[0], parameter.make_metavar(context)]
    return " ".join(words)


def _command(name: str) -> tuple[click.Command, click.Context]:
    parent = click.Context(main, info_name="tq-onnx")
    command = main.get_command(parent, name)
    if command is None:
        raise ValueError(f"there is no command {name!r}")
    context = click.Context(
        command,
        info_name=name,
        parent=parent,
        help_option_names=main.context_settings["help_option_names"],
    )
    return command, context


def _environment() -> str:
    return table(
        ("variable", "values", "effect", "read by"),
        (
            (f"`{variable.name}`", variable.values, variable.meaning, ", ".join(variable.readers))
            for variable in VARIABLES
        ),
    )


def _floors() -> str:
    contracts = _pyproject()["tool"]["importlinter"]["contracts"]
    [floors] = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    rows = []
    for count, floor in zip(range(len(floors), 0, -1), floors, strict=True):
        rows += [(count, f"`{room}`", _summary(room)) for room in re.findall(r"\w+", floor)]
    return table((">floor", "room", "content"), rows)


def _summary(room: str) -> str:
    documentation = importlib.import_module(f"tq_onnx.{room}").__doc__
    if not documentation:
        raise ValueError(f"tq_onnx.{room} has no docstring")
    return " ".join(documentation.split("\n\n", 1)[0].split()).replace("``", "`")


def _pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def _versions() -> str:
    project = _pyproject()["project"]
    optional = project["optional-dependencies"]
    cann = [line for line in CANN_REQUIREMENTS.read_text().splitlines() if "cann==" in line]
    genai = [line for line in optional["serve"] if line.startswith("onnxruntime-genai")]
    rows = [("Python", project["requires-python"].replace(">=", "") + " or newer", "required")]
    rows += [(*_requirement(line), "required") for line in project["dependencies"]]
    for extra in ("report", "serve"):
        lines = [line for line in optional[extra] if line not in genai]
        rows += [(*_requirement(line), f"optional: `tq-onnx[{extra}]`") for line in lines]
    rows += [(*_requirement(line), "runs converted folders; tested") for line in genai]
    rows += [(*_requirement(line), "runs `--target cann`; tested, Python 3.11") for line in cann]
    rows += [
        ("opset of an original", f"{MIN_OPSET} or newer", "older ones are refused"),
        ("opset of the function bodies", str(BODY_OPSET), "for runs without the operator library"),
    ]
    return table(("", "version", "use"), rows)


def _requirement(line: str) -> tuple[str, str]:
    requirement, _, marker = (part.strip() for part in line.partition(";"))
    match = re.fullmatch(r"([\w-]+)([<>=]=)(.+)", requirement)
    if match is None:
        raise ValueError(f"pyproject.toml: {line!r} is not NAME>=VERSION or NAME==VERSION")
    name, comparison, version = match.groups()
    when = re.sub(r"python_version (\S+) '([\d.]+)'", r"Python \1 \2", marker)
    said = f"{version} or newer" if comparison == ">=" else version
    return name, said + (f" ({when})" if when else "")


def _api() -> str:
    """Return each public name with its signature and what it is for.

    ``docs/pages.py`` puts the whole documentation there on the site.
    """
    names = [name for name in tq_onnx.__all__ if name not in ("__version__", "errors")]
    public = {f"tq_onnx.{name}": getattr(tq_onnx, name) for name in names}
    classes = {name: value for name, value in public.items() if isinstance(value, type)}
    functions = [_item(name, value) for name, value in public.items() if name not in classes]
    errors = [
        f"- `{error.__name__}`: {_first_line(error)}"
        for error in vars(tq_onnx.errors).values()
        if isinstance(error, type) and issubclass(error, tq_onnx.errors.TqOnnxError)
    ]
    parts = {
        "Functions and constants": functions,
        "Classes": [*map(_class, classes, classes.values())],
    }
    return "\n\n".join(
        f"### {title}\n\n" + "\n".join(lines)
        for title, lines in {**parts, "`tq_onnx.errors`": errors}.items()
    )


def _class(name: str, value: type) -> str:
    """Return a public class, and below it its methods and attributes."""
    members = [
        "  " + _item(member, attribute)
        for member, attribute in vars(value).items()
        if not member.startswith("_")
        and (inspect.isfunction(attribute) or isinstance(attribute, (property, cached_property)))
    ]
    return "\n".join([_item(name, value), *members])


def _item(name: str, value: object) -> str:
    """Return a name with its signature and its purpose."""
    if not callable(value) and not isinstance(value, (property, cached_property)):
        return f"- `{name}`: A mapping from names to presets; `tq-onnx presets` prints it."
    return f"- `{name}{_signature(value)}`: {_first_line(value)}"


def _signature(value: object) -> str:
    """Return the parameters of a callable, without types; nothing for an attribute."""
    if isinstance(value, (property, cached_property)) or not callable(value):
        return ""
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for name, parameter in inspect.signature(value).parameters.items()
        if name != "self"
    ]
    text = str(inspect.Signature(parameters))
    return re.sub(r"<[^>]*>", "...", text)


def _first_line(value: object) -> str:
    text = (inspect.getdoc(value) or "").split("\n\n", 1)[0]
    return " ".join(text.split()).replace("``", "`")


ROUTES: Final = {
    "mobius": "mobius 0.1",
    "optimum": "optimum-onnx 0.1",
    "optimum-1.22": "optimum 1.22",
    "transformers": "transformers 5.23",
    "genai": "onnxruntime-genai 0.18",
}
"""The folders of the exports that were compared, and what made them."""
FAMILIES: Final = ROOT / "docs" / "exports-families.json"
_FIRST_PROMPT: Final = "a graph for a first prompt"
"""It has no form in pages; the graph beside it has."""
_VERDICTS: Final = {"ok": "yes", "--": "refused", "..": "not run"}


def _families() -> str:
    """Render what ``python -m tests.agreement --results`` found in the exports of each route."""
    graphs = json.loads(FAMILIES.read_text(encoding="utf-8"))
    if unknown := {entry["verdict"] for entry in graphs.values()} - {*_VERDICTS}:
        raise ValueError(f"{FAMILIES.name} has graphs that are not right: {sorted(unknown)}")
    cells: dict[str, dict[str, set[str]]] = {}
    paged = {_row(name) for name, entry in graphs.items() if entry.get("paged") is not None}
    refused: dict[str, dict[str, list[str]]] = {}
    reasons: dict[tuple[str, str], str] = {}
    for name, entry in sorted(graphs.items()):
        route, family, *_ = name.split("/")
        verdict = _VERDICTS[entry["verdict"]]
        if verdict == "yes" and (family, route) in paged:
            verdict = "paged"
        elif (reason := entry.get("paged_reason")) and _FIRST_PROMPT not in reason:
            members = refused.setdefault(_without_nodes(reason), {}).setdefault(ROUTES[route], [])
            members += [f"`{family}`"] * (f"`{family}`" not in members)
        cells.setdefault(family, {}).setdefault(route, set()).add(verdict)
        if verdict not in ("yes", "paged"):
            text = re.sub(
                r"^layer \d+ \(node [^)]*\): |original does not run: ", "", entry["reason"]
            )
            text = re.sub(
                r"^onnxruntime cannot run the model: .*", "onnxruntime cannot run it", text
            )
            reasons.setdefault((family, route), text.removesuffix(" (and 1 more)"))
    rows = [
        (f"`{family}`", *(" and ".join(sorted(verdicts.get(route, "-"))) for route in ROUTES))
        for family, verdicts in sorted(cells.items())
    ]
    kinds = [_VERDICTS[entry["verdict"]] for entry in graphs.values()]
    figures = [entry["paged"] for entry in graphs.values() if entry.get("paged") is not None]
    worst = max(entry["worst"] or 0 for entry in graphs.values())
    return "\n".join(
        [
            f"Of {len(graphs)} graphs {kinds.count('yes')} agree, to {worst:.1e} of the largest "
            f"logit; {kinds.count('refused')} are refused by name, "
            f"and {kinds.count('not run')} were not compared: their originals do not run.",
            "",
            table(("family", *ROUTES.values()), rows),
            "",
            table(
                ("family", "route", "reason"),
                [(f"`{family}`", ROUTES[route], text) for (family, route), text in reasons.items()],
            ),
            "",
            f"`paged`: of {sum('paged' in entry for entry in graphs.values())} graphs that were "
            f"converted with `--paged`, too, {len(figures)} gave each packed request what "
            f"it has alone, to {max(figures):.1e} of the largest logit. The others are refused:",
            "",
            table(
                ("with `--paged`", "families"),
                [
                    (
                        reason,
                        "; ".join(
                            f"{route}: {', '.join(members)}" for route, members in by.items()
                        ),
                    )
                    for reason, by in sorted(refused.items())
                ],
            ),
        ]
    )


def _row(name: str) -> tuple[str, str]:
    """Return the family and the route of a graph."""
    route, family, *_ = name.split("/")
    return family, route


def _without_nodes(reason: str) -> str:
    """Return a refusal without the names of layers, nodes and values, which differ by family."""
    text = re.sub(r"^layer \d+ \(node [^)]*\): ", "", reason)
    text = re.sub(r"\S+ \((\w+)\) is", r"\1 is", text)
    return re.sub(r"(?<!\S)/\S+", "a value", re.sub(r" of layer \d+", "", text))


def _cann_features() -> str:
    return table(("", "there is"), CANN_FEATURES)


def _targets() -> str:
    """Return what each target takes: element types, head sizes, codecs and features."""
    columns = {name: target.capabilities for name, target in TARGETS.items()}

    def bits(target: Capabilities, kind: str) -> str:
        return ", ".join(str(codec.bits) for codec in target.codecs if codec.kind == kind)

    def row(name: str, cell: Callable[[Capabilities], str]) -> tuple[str, ...]:
        return name, *(cell(target) or "-" for target in columns.values())

    return table(
        ("", *columns),
        [
            row("element types", lambda target: words(map(str.lower, target.elements))),
            row("head sizes", lambda target: words(target.head_sizes or ["any"])),
            *(row(f"bits of `{kind}`", partial(bits, kind=kind)) for kind in KINDS),
            *(
                row(feature.name, partial(Capabilities.note, feature=feature))
                for feature in FEATURES
            ),
        ],
    )


BLOCKS: Final[dict[str, Callable[..., str]]] = {
    "choices": _choices,
    "models-quality": _models_quality,
    "generator-quality": _generator_quality,
    "pages-quality": _pages_quality,
    "long-quality": _long_quality,
    "presets": _presets,
    "rows": _rows,
    "operator": _operator,
    "commands": _commands,
    "help": _help,
    "environment": _environment,
    "api": _api,
    "floors": _floors,
    "versions": _versions,
    "families": _families,
    "cann-features": _cann_features,
    "targets": _targets,
    "decode-machine": measured.machine,
    "presets-speed": measured.presets,
    "prompts": measured.prompts,
    "whole-models": measured.whole,
    "serving": measured.serving,
    "decode": lambda argument: measured.table(*argument.split()),
    "decode-lead": measured.lead,
    "decode-summary": lambda argument: measured.summary(*argument.split()),
    "javascript": measured.javascript,
}
"""The renderer of each block, by name; words behind the name are its argument."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Write or check the blocks; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument(
        "--check", action="store_true", help="only compare; status 1 if one differs"
    )
    check = parser.parse_args(arguments).check
    lacking = list(missing("".join(path.read_text(encoding="utf-8") for path in documents())))
    for sentence in lacking:
        print(sentence)
    stale = []
    rendered = {path: render(path.read_text(encoding="utf-8")) for path in documents()}
    for path, new in {**rendered, **schemas.files()}.items():
        if not path.exists() or new != path.read_text(encoding="utf-8"):
            stale.append(path)
            if not check:
                path.write_text(new, encoding="utf-8", newline="\n")
    for path in stale:
        print(
            path.relative_to(ROOT), "differs: run python docs/generate.py" if check else "written"
        )
    return 1 if lacking or (check and stale) else 0


if __name__ == "__main__":
    raise SystemExit(run())
