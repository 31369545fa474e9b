"""docs/reference.md: every key that a person may set, generated from the dataclasses that own them.

    stages/*.py (Params), params.yaml (the order of its blocks), conf/ -> docs/reference.md

    python -m pipeline.tools.reference              writes the file
    python -m pipeline.tools.reference --check      writes nothing; exits with 1 and prints the first difference if the
                                                    file is out of date

A key's meaning is the docstring under its field (`stage.meanings`); a field without one is an error that names it.
Values are those of the scale files, or the field's default. New stages, model files and presets are found by
themselves; the environment variables are the table ENVIRONMENT below.

Not promised: the values of params.yaml and the presets (python -m stages.<s> --help shows the effective values), or
which values of two keys exclude each other (see `__post_init__` of the class).
"""

import dataclasses
import importlib
import itertools
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pipeline.model.config import ModelConfig
from pipeline.model.transformer import Transformer
from pipeline.run.config import GROUPS, Runtime, Value, build, is_flat, read_yaml, stage_names
from pipeline.run.errors import InputError
from pipeline.run.stage import meanings

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

OUT = Path("docs/reference.md")
SCALES = ("smoke", "demo", "gpu", "cluster")
NOT_GIVEN = "–"
SIZES = ("vocab_size", "width", "layers", "heads", "kv_heads", "head_dim", "d_ff", "max_context", "tied")

HEAD = """\
# Reference: every key

Written by `python -m pipeline.tools.reference` from the code: a meaning is the docstring under the key's field. Change
it there, then run the command again.

**The tables.** Under `smoke`, `demo`, `gpu`, `cluster` stands what `conf/scale/` says, in *italics* the default if it
says nothing, and – where a value is required and not given. `adapter.rank` is a key inside `adapter`; "below" says that
the scale file, or a default, sets some of these. A block that no scale file mentions has one column, the default.

**Which value holds.** The first that is found: the command line, `params.yaml` where it is not null, the block's
preset, the scale file, the default. An unknown key, or a value of the wrong type, is an error.

**How to set a key.** `dvc repro` after an edit of `params.yaml`, or:

```
dvc exp run -S language.steps=300                                # a key that stands in params.yaml
dvc exp run -S +language.schedule=wsd                            # one that does not: with a plus
dvc exp run -S grpo.adapter=none                                 # none switches off what may be absent
python -m stages.language language.steps=300 language.schedule=wsd    # one stage without DVC; never a plus
python -m stages.language --help                       # its keys, the values that hold now, where each is from
```
"""

# Variables that a person sets, or another program for us: name -> meaning
ENVIRONMENT = {
    "STAGECOACH_LAUNCH": (
        "in how many processes a stage trains: `4` (DDP), `fsdp2:4`, or a file of `conf/launch/`; empty or 1: one"
    ),
    "MASTER_ADDR": "the address of rank 0, by which the processes of a run watch each other; a launcher sets it",
    "MACHINE_RANK": "which of several machines this is, from 0; goes before `machine_rank` of the launch file",
    "OMP_NUM_THREADS": (
        "threads of a process; not set: PyTorch's choice, and for several processes on a CPU the cores divided by them"
    ),
    "CUDA_VISIBLE_DEVICES": "CUDA's own: which GPUs the processes see",
    "STAGECOACH_WORK": (
        "the folder of resumable work; not set: `.work` beside `dvc.yaml`; several machines need one that all share"
    ),
    "STAGECOACH_MLFLOW": (
        "`off`: no MLflow; `later`: what it gets waits in the work folder, as under the launcher, which delivers it"
    ),
    "STAGECOACH_DEVICE": "what `runtime.device` says, for programs that read no params.yaml: auto, cpu, cuda or mps",
    "MLFLOW_TRACKING_URI": "where MLflow's runs go; not set: a SQLite file beside `dvc.yaml`",
    "WANDB_MODE": "Weights & Biases' own, for `runtime.trackers: [wandb]`; `offline` keeps its runs in the work folder",
    "STAGECOACH_API_KEYS": (
        "keys that the server takes, separated by commas; needed where others than this machine may ask"
    ),
    "STAGECOACH_SAMPLER_KEY": "the key of an engine that samples for a policy, when it is on another machine",
    "STAGECOACH_SANDBOX_TOKEN": "the token of the sandbox service, the same on its machine and on the one that asks",
    "HF_TOKEN": (
        "huggingface_hub's own: opens gated models and data sets, and lets a model be published; so are HF_HOME (its"
        " cache), HF_ENDPOINT and HF_HUB_OFFLINE"
    ),
    "HF_HUB_DISABLE_XET": "huggingface_hub's own; `0`: publish by Xet (untried) instead of Git LFS",
    "CXX": "the C++ compiler of the CPU pieces; not set: g++, then clang++",
    "CC": "the C compiler that torch.compile needs on a GPU; not set: cc, then gcc or clang",
    "TORCHINDUCTOR_CACHE_DIR": "where compiled layers are kept; not set: `compile` in the work folder",
    "TORCH_CPP_LOG_LEVEL": "PyTorch's own; not set: ERROR",
    "OMP_WAIT_POLICY": "OpenMP's own; not set: PASSIVE",
    "GOMP_SPINCOUNT": "OpenMP's own; not set: 1000 for the stages of `make`; 0 on a machine that has much else to do",
}
# Set by DVC, by the launcher or by us for our own processes: not to be set by hand
INTERNAL = (
    "STAGECOACH_LOCKED",
    "DVC_ROOT",
    "DVC_STAGE",
    "DVC_EXP_NAME",
    "DVC_EXP_BASELINE_REV",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "ACCELERATE_USE_FSDP",
    "ACCELERATE_USE_CPU",
    "FSDP_VERSION",
    "FSDP_RESHARD_AFTER_FORWARD",
    "FSDP_OFFLOAD_PARAMS",
    "TOKENIZERS_PARALLELISM",
    "STAGECOACH_ENDED",
    "MAKELEVEL",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyBlock:
    """A block of keys: a section of the document."""

    name: str
    kind: "type[DataclassInstance]"
    says: str = ""  # a sentence about it
    also: tuple[str, ...] = ()  # links to what else the stage reads
    presets: tuple[str, ...] = ()  # names of files in conf/preset/<block>/


def document(root: Path) -> str:
    """The whole text. Raises InputError for a field without a meaning, ConfigError for an invalid file of conf/."""
    all_blocks = blocks(root)
    scales = [read_yaml(root / "conf" / "scale" / f"{name}.yaml") for name in SCALES]
    with_keys = [block for block in all_blocks if dataclasses.fields(block.kind)]
    without_keys = [f"`{block.name}`" for block in all_blocks if block not in with_keys]
    links = [f"[{block.name}](#{block.name})" for block in with_keys]
    links += [
        f"[{title}](#{title.replace(' ', '-')})" for title in ("model files", "data files", "presets", "environment")
    ]
    no_keys = f". Without keys: {', '.join(without_keys)}." if without_keys else ""
    parts = [HEAD, " · ".join(links) + no_keys + "\n", top_level_keys(root)]
    parts += [section(block, scales) for block in with_keys]
    parts += [model_files(root), data_files(), presets(root), environment()]
    return "\n".join(parts)


def blocks(root: Path) -> list[KeyBlock]:
    """The blocks of params.yaml in its order, then those that are not in it, then `runtime`."""
    stages, result = stage_names(root), []
    shared: dict[str, Any] = {}  # blocks that belong to no stage
    for stage in stages:
        module = importlib.import_module(f"stages.{stage}")
        preset_names = tuple(sorted(path.stem for path in (root / "conf" / "preset" / stage).glob("*.yaml")))
        sources = _sources(module.Params)
        links = tuple(text for name, kind in sources for text in _links(name, kind, stages))
        shared |= {name: kind for name, kind in sources if dataclasses.is_dataclass(kind) and name not in stages}
        shared = {name: kind for name, kind in shared.items() if name not in GROUPS}
        result.append(
            KeyBlock(
                name=stage, kind=module.Params, says=_sentence(module.__doc__ or ""), also=links, presets=preset_names
            )
        )
    for name, kind in shared.items():
        readers = [f"`{block.name}`" for block in result if name in dict(_sources(block.kind))]
        result.append(KeyBlock(name=name, kind=kind, says=f"Read by {', '.join(readers)}."))
    result.append(
        KeyBlock(
            name="runtime",
            kind=Runtime,
            says=(
                "How a run is carried out: read by all stages, tracked by none, "
                "since none of it changes more of a result than its rounding."
            ),
        )
    )
    order = [name for name in read_yaml(root / "params.yaml") if name != "runtime"]
    positions = {name: position for position, name in enumerate(order)} | {"runtime": len(order) + 1}
    return sorted(result, key=lambda block: positions.get(block.name, len(order)))


def _sources(kind: "type[DataclassInstance]") -> list[tuple[str, Any]]:
    """(source, type) of the fields that come from a group or another block."""
    hints = typing.get_type_hints(kind)
    fields = [(field.metadata.get("from"), hints[field.name]) for field in dataclasses.fields(kind)]
    return [(source, hint) for source, hint in fields if source is not None]


def _links(source: str, kind: Any, stages: Sequence[str]) -> list[str]:
    """Links to what a stage reads from a group, from the keys of another stage, or from a shared block."""
    if source in GROUPS:
        return [f"the [{source} file](#{source}-files)"]
    if source in stages:
        return [f"`{source}.{field.name}`" for field in dataclasses.fields(kind)]
    if source.startswith("conf/"):  # one key of a certain file
        path, _, key = source.partition(":")
        return [f"`{key}` of `{path}`"]
    return [f"`{source}`" if "." in source else f"[`{source}`](#{source})"]


def _sentence(docstring: str) -> str:
    """The first paragraph of a stage's docstring without `Stage <name>: `."""
    text = " ".join(docstring.strip().split("\n\n")[0].split())
    text = re.sub(r"^Stage \w+: ", "", text)
    return text[:1].upper() + text[1:]


def top_level_keys(root: Path) -> str:
    """The table of the keys beside the blocks."""
    rows = [
        ["`seed`", "int", "every draw of training begins from it: weights, order, noise, sampled answers"],
        [
            "`data_seed`",
            "int",
            "every draw that makes data or measures: corpus, tasks, items, resamples; another one rebuilds all",
        ],
    ]
    for group, meaning in zip(
        GROUPS, ("the size of the model", "how long and how big", "where the data come from"), strict=True
    ):
        names = ", ".join(sorted(path.stem for path in (root / "conf" / group).glob("*.yaml")))
        rows.append([f"`{group}`", "str", f"{meaning}, a file of `conf/{group}/`: {names}"])
    return table(["key", "type", "meaning"], rows)


def section(block: KeyBlock, scales: Sequence[Mapping[str, Any]]) -> str:
    """The section of a block: a sentence, what else its stage reads, a row for each key."""
    layers = [scale.get(block.name) or {} for scale in scales]
    columns = SCALES if any(layers) else ("default",)
    rows = list(rows_of(block.kind, layers if any(layers) else None))
    if block.presets:
        meaning = f"a file of `conf/preset/{block.name}/`: {', '.join(block.presets)}"
        rows.insert(0, ["`preset`", "str or none", *("*none*" for _ in columns), meaning])
    lines = [f"## {block.name}\n"] + ([f"{block.says}\n"] if block.says else [])
    if block.also:
        lines.append(f"Also reads: {', '.join(block.also)}.\n")
    return "\n".join(lines + ([table(["key", "type", *columns, "meaning"], rows)] if rows else []))


def rows_of(
    kind: "type[DataclassInstance]", layers: Sequence[Mapping[str, Any]] | None, prefix: str = ""
) -> Iterator[list[str]]:
    """A row for each key of a dataclass, those of nested ones below their parent, with a column for each of the layers
    (None: for the default alone).

    Raises InputError for a field without a meaning.
    """
    hints, texts = typing.get_type_hints(kind), meanings(kind)
    lists: list[Any] = []  # types of lists of blocks, whose keys are rows below the first field of the type
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if field.metadata.get("from") is not None:
            continue
        if is_flat(hint):
            yield from rows_of(hint, layers, prefix)
            continue
        if field.name not in texts:
            raise InputError(
                f"{kind.__module__}.{kind.__qualname__}.{field.name} has no meaning; write it as a docstring under the"
                " field"
            )
        raws = [] if layers is None else [layer.get(field.name) for layer in layers]
        nested_kinds = [] if hint in lists else nested(hint)
        lists += [hint] if typing.get_origin(hint) is list and nested_kinds else []
        values = [default(field)] if layers is None else [cell(field, raw, has_rows=bool(nested_kinds)) for raw in raws]
        yield [f"`{prefix}{field.name}`", type_of(hint), *values, escaped(texts[field.name])]
        for path, inner_kind in nested_kinds:
            inner_layers = [raw if isinstance(raw, Mapping) and not path else {} for raw in raws]
            yield from rows_of(inner_kind, inner_layers or None, f"{prefix}{field.name}{path}.")


def nested(hint: Any) -> list[tuple[str, Any]]:
    """The dataclasses in a type, each with its path: `.*` any key of a mapping, `[]` any entry of a list."""
    if dataclasses.is_dataclass(hint):
        return [("", hint)]
    step = {dict: ".*", list: "[]", tuple: "[]"}.get(typing.get_origin(hint) or hint, "")
    return [(step + path, kind) for part in typing.get_args(hint) for path, kind in nested(part)]


def type_of(hint: Any) -> str:
    """A type for a table: `int or none`, `list of str`, `block` for one with keys of its own."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return "block"
    if isinstance(hint, types.UnionType):
        return " or ".join(dict.fromkeys(type_of(part) for part in parts))
    if origin is typing.Literal:
        return " or ".join(map(str, parts))
    if origin in (list, tuple):
        return f"list of {type_of(parts[0])}"
    if origin is dict:
        return f"dict of {type_of(parts[1])}"
    return "none" if hint is type(None) else hint.__name__


def cell(field: dataclasses.Field[Any], raw: object, *, has_rows: bool) -> str:
    """The cell of a scale: the value of its file, or the default in italics. `has_rows`: nested keys are rows below."""
    if raw is not None:
        return "below" if has_rows and not isinstance(raw, str) else escaped(shown(raw))
    text = default(field)
    return text if text == NOT_GIVEN else f"*{text}*"


def default(field: dataclasses.Field[Any]) -> str:
    """The cell of a field's default."""
    if field.default is not dataclasses.MISSING:
        return escaped(shown(field.default))
    if field.default_factory is dataclasses.MISSING:
        return NOT_GIVEN
    value = field.default_factory()
    return "below" if dataclasses.is_dataclass(value) else escaped(shown(value))


def shown(raw: object) -> str:
    """A value as YAML on one line."""
    if raw is None:
        return "none"
    if isinstance(raw, bool):
        return str(raw).lower()
    if isinstance(raw, float):
        return re.sub(r"e([+-])0*", lambda match: f"e{match[1].strip('+')}", repr(raw))
    if isinstance(raw, Mapping):
        return "{" + ", ".join(f"{key}: {shown(entry)}" for key, entry in raw.items()) + "}"
    if isinstance(raw, list | tuple):
        return "[" + ", ".join(shown(entry) for entry in raw) + "]"
    return str(raw)


def escaped(text: str) -> str:
    """Text for a cell: pipes escaped everywhere, and the marks of Markdown and HTML outside backticks."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([*<\\]|(?<!\w)_|_(?!\w))", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts).replace("|", r"\|")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def model_files(root: Path) -> str:
    """The keys of the files of conf/model/, and the sizes of their models."""
    sizes = []
    for path in sorted((root / "conf" / "model").glob("*.yaml")):
        origin = str(path.relative_to(root))
        config = build(ModelConfig, {key: Value(raw, origin) for key, raw in read_yaml(path).items()}, "model")
        with torch.device("meta"):  # shapes only: nothing is allocated
            total = Transformer(config).num_parameters()
        sizes.append([f"`{path.stem}`", *(shown(getattr(config, name)) for name in SIZES), f"{total:,}"])
    return (
        "## model files\n\nA file of `conf/model/`, chosen by `model`; on the command line `model.layers=6` changes a"
        " key of it.\n\n"
        + table(["key", "type", "default", "meaning"], list(rows_of(ModelConfig, None)))
        + "\nThe files, and all parameters of their models:\n\n"
        + table(["file", *SIZES, "parameters"], sizes)
    )


def data_files() -> str:
    """The keys of the files of conf/data/."""
    kind = typing.get_type_hints(importlib.import_module("stages.corpus").Params)["data"]
    return (
        "## data files\n\nA file of `conf/data/`, chosen by `data`. The first word of some meanings is the `source`"
        " that reads the key.\n\n" + table(["key", "type", "default", "meaning"], list(rows_of(kind, None)))
    )


def presets(root: Path) -> str:
    """The presets, each with the first line of its file. Raises InputError if that is no comment."""
    rows = []
    for path in sorted((root / "conf" / "preset").glob("*/*.yaml")):
        first = path.read_text(encoding="utf-8").splitlines()[0]
        if not first.startswith("#"):
            raise InputError(
                f"{path}: expected a comment in the first line that says what the preset is, found {first!r}"
            )
        rows.append([f"`{path.parent.name}.preset={path.stem}`", escaped(first.lstrip("# "))])
    return "## presets\n\nFiles of `conf/preset/`: the hyper-parameters of a paper or a document, by name.\n\n" + table(
        ["preset", "what it is"], rows
    )


def environment() -> str:
    """The environment variables."""
    rows = [[f"`{name}`", escaped(meaning)] for name, meaning in ENVIRONMENT.items()]
    internal = ", ".join(f"`{name}`" for name in INTERNAL)
    return (
        "## environment\n\nVariables that the program reads. None of them changes more of a result than its"
        " rounding.\n\n"
        + table(["variable", "meaning"], rows)
        + f"\nNot to be set by hand, since DVC, the launcher and the program itself set them: {internal}.\n"
    )


def difference(old: str, new: str) -> str:
    """The first difference of two texts, for a message."""
    lines = itertools.zip_longest(old.split("\n"), new.split("\n"), fillvalue="(the end)")
    number, (found, expected) = next((n, pair) for n, pair in enumerate(lines, start=1) if pair[0] != pair[1])
    return f"line {number}: expected {expected[:100]!r}, found {found[:100]!r}"


def main(argv: list[str]) -> int:
    """Write the document, or with --check compare it; the exit code."""
    if argv not in ([], ["--check"]):
        sys.stderr.write(f"usage: python -m pipeline.tools.reference [--check]; got {' '.join(argv)}\n")
        return 2
    try:
        text = document(Path())
    except InputError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    if not argv:
        OUT.write_text(text, encoding="utf-8")
        return 0
    old = OUT.read_text(encoding="utf-8") if OUT.is_file() else ""
    if old != text:
        sys.stderr.write(f"{OUT} is out of date: {difference(old, text)}; run python -m pipeline.tools.reference\n")
    return int(old != text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
