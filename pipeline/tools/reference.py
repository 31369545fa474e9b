"""docs/reference.md: every configuration key, generated from the dataclasses that define the keys.

    stages/*.py (Params), params.yaml (the order of its blocks), conf/ -> docs/reference.md

    python -m pipeline.tools.reference              write the file
    python -m pipeline.tools.reference --check      write nothing; if the file is out of date, print the first
                                                    difference and exit with 1

A key's meaning is the docstring under its field (`stage.meanings`); a field without one raises an error that names it.
Values come from the scale files, or are the field's default. New stages, model files and presets are picked up
automatically; environment variables are listed in ENVIRONMENT below.

Not included: the values of params.yaml and the presets (python -m stages.<s> --help shows the effective values), and
which values cannot be combined (see `__post_init__` of the class).
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

Generated from the code by `python -m pipeline.tools.reference`: each meaning is the docstring under the key's field.
Edit it there, then rerun the command.

**The tables.** The columns `smoke`, `demo`, `gpu`, `cluster` show the values in `conf/scale/`. If a scale file sets no
value, they show the default in *italics*, or `–` if a value is required. `adapter.rank` is a key inside `adapter`;
"below" means that the scale file, or a default, sets some inner keys. A block in no scale file has one column, the
default.

**Precedence.** The first value found wins: the command line, `params.yaml` unless its value is null, the block's
preset, the scale file, the default. An unknown key, or a value of the wrong type, is an error.

**How to set a key.** Edit `params.yaml` and run `dvc repro`, or:

```
dvc exp run -S language.steps=300                                # a key that is in params.yaml
dvc exp run -S +language.schedule=wsd                            # a key that is not: prefix it with a plus
dvc exp run -S grpo.adapter=none                                 # none disables an optional block
python -m stages.language language.steps=300 language.schedule=wsd    # one stage without DVC; never use a plus
python -m stages.language --help                       # its keys, their current values and origins
```
"""

# Variables set by the user, or by another program for us: name -> meaning
ENVIRONMENT = {
    "STAGECOACH_LAUNCH": (
        "number of training processes: `4` (DDP), `fsdp2:4`, or a file in `conf/launch/`; empty or 1: one"
    ),
    "MASTER_ADDR": "the address of rank 0, which the processes of a run use to monitor each other; set by the launcher",
    "MACHINE_RANK": "this machine's index, from 0, in a run on several machines; overrides `machine_rank`",
    "OMP_NUM_THREADS": (
        "threads per process; unset: PyTorch's choice, or for several processes on a CPU an equal share of the cores"
    ),
    "CUDA_VISIBLE_DEVICES": "CUDA's own: which GPUs the processes see",
    "STAGECOACH_WORK": (
        "the folder for resumable work; unset: `.work` next to `dvc.yaml`; several machines need a shared folder"
    ),
    "STAGECOACH_MLFLOW": (
        "`off`: no MLflow; `later`: calls are queued in the work folder, as under the launcher, which delivers them"
    ),
    "STAGECOACH_DEVICE": "like `runtime.device`, for programs that do not read params.yaml: auto, cpu, cuda or mps",
    "MLFLOW_TRACKING_URI": "where MLflow's runs go; unset: a SQLite file next to `dvc.yaml`",
    "WANDB_MODE": "Weights & Biases' own, for `runtime.trackers: [wandb]`; `offline` keeps its runs in the work folder",
    "STAGECOACH_API_KEYS": (
        "API keys that the server accepts, separated by commas; required if other machines can connect"
    ),
    "STAGECOACH_SAMPLER_KEY": "the API key of a sampling engine on another machine",
    "STAGECOACH_SANDBOX_TOKEN": "the token of the sandbox service, the same on the server and the client",
    "HF_TOKEN": (
        "huggingface_hub's own: for gated models and data sets, and for publishing; likewise HF_HOME (its cache),"
        " HF_ENDPOINT and HF_HUB_OFFLINE"
    ),
    "HF_HUB_DISABLE_XET": "huggingface_hub's own; `0`: publish with Xet (untested) instead of Git LFS",
    "CXX": "the C++ compiler for the CPU extensions; unset: g++, then clang++",
    "CC": "the C compiler that torch.compile needs on a GPU; unset: cc, then gcc or clang",
    "TORCHINDUCTOR_CACHE_DIR": "the cache for compiled layers; unset: `compile` in the work folder",
    "TORCH_CPP_LOG_LEVEL": "PyTorch's own; unset: ERROR",
    "OMP_WAIT_POLICY": "OpenMP's own; unset: PASSIVE",
    "GOMP_SPINCOUNT": "OpenMP's own; unset: 1000 for the stages of `make`; use 0 on a busy machine",
}
# Set by DVC, by the launcher or by our code for its own processes: do not set these by hand
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
    says: str = ""  # a sentence about the block
    also: tuple[str, ...] = ()  # links to other inputs of the stage
    presets: tuple[str, ...] = ()  # file names in conf/preset/<block>/


def document(root: Path) -> str:
    """The full text. Raises InputError for a field without a meaning, ConfigError for an invalid file in conf/."""
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
    """The blocks of params.yaml in order, then those not in params.yaml, then `runtime`."""
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
                "How a run is executed: read by all stages, tracked by none, "
                "since it changes results by rounding at most."
            ),
        )
    )
    order = [name for name in read_yaml(root / "params.yaml") if name != "runtime"]
    positions = {name: position for position, name in enumerate(order)} | {"runtime": len(order) + 1}
    return sorted(result, key=lambda block: positions.get(block.name, len(order)))


def _sources(kind: "type[DataclassInstance]") -> list[tuple[str, Any]]:
    """(source, type) of fields filled from a group or another block."""
    hints = typing.get_type_hints(kind)
    fields = [(field.metadata.get("from"), hints[field.name]) for field in dataclasses.fields(kind)]
    return [(source, hint) for source, hint in fields if source is not None]


def _links(source: str, kind: Any, stages: Sequence[str]) -> list[str]:
    """Links to what a stage reads from a group, from the keys of another stage, or from a shared block."""
    if source in GROUPS:
        return [f"the [{source} file](#{source}-files)"]
    if source in stages:
        return [f"`{source}.{field.name}`" for field in dataclasses.fields(kind)]
    if source.startswith("conf/"):  # one key of a specific file
        path, _, key = source.partition(":")
        return [f"`{key}` from `{path}`"]
    return [f"`{source}`" if "." in source else f"[`{source}`](#{source})"]


def _sentence(docstring: str) -> str:
    """The first paragraph of a stage's docstring without `Stage <name>: `."""
    text = " ".join(docstring.strip().split("\n\n")[0].split())
    text = re.sub(r"^Stage \w+: ", "", text)
    return text[:1].upper() + text[1:]


def top_level_keys(root: Path) -> str:
    """The table of top-level keys outside the blocks."""
    rows = [
        ["`seed`", "int", "seeds everything random in training: weights, order, noise, sampled answers"],
        [
            "`data_seed`",
            "int",
            "seeds data generation and evaluation: corpus, tasks, items, resamples; changing it rebuilds everything",
        ],
    ]
    for group, meaning in zip(
        GROUPS, ("the size of the model", "how big and how long the runs are", "where the data comes from"), strict=True
    ):
        names = ", ".join(sorted(path.stem for path in (root / "conf" / group).glob("*.yaml")))
        rows.append([f"`{group}`", "str", f"{meaning}, a file in `conf/{group}/`: {names}"])
    return table(["key", "type", "meaning"], rows)


def section(block: KeyBlock, scales: Sequence[Mapping[str, Any]]) -> str:
    """The section of a block: a sentence, other inputs of its stage, a row per key."""
    layers = [scale.get(block.name) or {} for scale in scales]
    columns = SCALES if any(layers) else ("default",)
    rows = list(rows_of(block.kind, layers if any(layers) else None))
    if block.presets:
        meaning = f"a file in `conf/preset/{block.name}/`: {', '.join(block.presets)}"
        rows.insert(0, ["`preset`", "str or none", *("*none*" for _ in columns), meaning])
    lines = [f"## {block.name}\n"] + ([f"{block.says}\n"] if block.says else [])
    if block.also:
        lines.append(f"Also reads: {', '.join(block.also)}.\n")
    return "\n".join(lines + ([table(["key", "type", *columns, "meaning"], rows)] if rows else []))


def rows_of(
    kind: "type[DataclassInstance]", layers: Sequence[Mapping[str, Any]] | None, prefix: str = ""
) -> Iterator[list[str]]:
    """A row per key of a dataclass, nested keys below their parent, with a column per layer (None: only the default).

    Raises InputError for a field without a meaning.
    """
    hints, texts = typing.get_type_hints(kind), meanings(kind)
    lists: list[Any] = []  # types of lists of blocks; their keys are rows below the first field of that type
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if field.metadata.get("from") is not None:
            continue
        if is_flat(hint):
            yield from rows_of(hint, layers, prefix)
            continue
        if field.name not in texts:
            raise InputError(
                f"{kind.__module__}.{kind.__qualname__}.{field.name} has no documented meaning; add a docstring under"
                " the field"
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
    """The dataclasses in a type, each with its path: `.*` for any key of a mapping, `[]` for any list entry."""
    if dataclasses.is_dataclass(hint):
        return [("", hint)]
    step = {dict: ".*", list: "[]", tuple: "[]"}.get(typing.get_origin(hint) or hint, "")
    return [(step + path, kind) for part in typing.get_args(hint) for path, kind in nested(part)]


def type_of(hint: Any) -> str:
    """A type for a table: `int or none`, `list of str`, `block` for one with its own keys."""
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
    """A scale's cell: the value in its file, or the default in italics. `has_rows`: its nested keys have rows below."""
    if raw is not None:
        return "below" if has_rows and not isinstance(raw, str) else escaped(shown(raw))
    text = default(field)
    return text if text == NOT_GIVEN else f"*{text}*"


def default(field: dataclasses.Field[Any]) -> str:
    """The cell for a field's default."""
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
    """Text for a cell: pipes escaped everywhere, Markdown and HTML markup outside backticks."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([*<\\]|(?<!\w)_|_(?!\w))", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts).replace("|", r"\|")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def model_files(root: Path) -> str:
    """The keys of the files in conf/model/, and the sizes of their models."""
    sizes = []
    for path in sorted((root / "conf" / "model").glob("*.yaml")):
        origin = str(path.relative_to(root))
        config = build(ModelConfig, {key: Value(raw, origin) for key, raw in read_yaml(path).items()}, "model")
        with torch.device("meta"):  # shapes only: nothing is allocated
            total = Transformer(config).num_parameters()
        sizes.append([f"`{path.stem}`", *(shown(getattr(config, name)) for name in SIZES), f"{total:,}"])
    return (
        "## model files\n\nA file in `conf/model/`, selected by `model`; override a key on the command line with"
        " `model.layers=6`.\n\n"
        + table(["key", "type", "default", "meaning"], list(rows_of(ModelConfig, None)))
        + "\nThe files and the total number of parameters:\n\n"
        + table(["file", *SIZES, "parameters"], sizes)
    )


def data_files() -> str:
    """The keys of the files in conf/data/."""
    kind = typing.get_type_hints(importlib.import_module("stages.corpus").Params)["data"]
    return (
        "## data files\n\nA file in `conf/data/`, selected by `data`. If a meaning begins with a source, only that"
        " `source` uses the key.\n\n" + table(["key", "type", "default", "meaning"], list(rows_of(kind, None)))
    )


def presets(root: Path) -> str:
    """The presets, each with the first line of its file. Raises InputError if that is not a comment."""
    rows = []
    for path in sorted((root / "conf" / "preset").glob("*/*.yaml")):
        first = path.read_text(encoding="utf-8").splitlines()[0]
        if not first.startswith("#"):
            raise InputError(f"{path}: expected the first line to be a comment about the preset, found {first!r}")
        rows.append([f"`{path.parent.name}.preset={path.stem}`", escaped(first.lstrip("# "))])
    return "## presets\n\nFiles in `conf/preset/`: the hyperparameters of a paper or a document, by name.\n\n" + table(
        ["preset", "what it is"], rows
    )


def environment() -> str:
    """The environment variables."""
    rows = [[f"`{name}`", escaped(meaning)] for name, meaning in ENVIRONMENT.items()]
    internal = ", ".join(f"`{name}`" for name in INTERNAL)
    return (
        "## environment\n\nEnvironment variables that the program reads. They change results by rounding at most.\n\n"
        + table(["variable", "meaning"], rows)
        + f"\nDo not set these by hand; DVC, the launcher and the program itself set them: {internal}.\n"
    )


def difference(old: str, new: str) -> str:
    """The first difference between two texts, for a message."""
    lines = itertools.zip_longest(old.split("\n"), new.split("\n"), fillvalue="(the end)")
    number, (found, expected) = next((n, pair) for n, pair in enumerate(lines, start=1) if pair[0] != pair[1])
    return f"line {number}: expected {expected[:100]!r}, found {found[:100]!r}"


def main(argv: list[str]) -> int:
    """Write the document, or with --check compare it; returns the exit code."""
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
