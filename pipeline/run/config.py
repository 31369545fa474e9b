"""params.yaml + conf/ + command line -> frozen dataclasses, strictly checked.

Precedence, highest first: the command line, params.yaml unless the value is null, the stage's preset
(`conf/preset/<stage>/<name>.yaml`), its block in the scale file, the dataclass default. In params.yaml, a config group
names a file in conf/ (`model: nano`), which Hydra's compose API loads. An unknown key, a missing key or a wrong
type raises a ConfigError that names the file, block, key and valid keys.

    python -m stages.language language.steps=3 runtime.fresh=true     one stage, without DVC
    python -m stages.language --help                                  every key: type, value, origin, meaning
    python -m pipeline.run.config                                     check the parameters of all stages

The `runtime` block of params.yaml controls how a run is executed. All stages read it and none tracks it, because it
changes results at most by rounding.

Not supported: interpolation (`${...}` in params.yaml is rejected: the first `dvc exp run -S` would freeze it). Not
guaranteed: bit-identical results across precisions, micro-batches or process counts, or between compiled and eager
layers (a resumed run logs such a change).
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import re
import sys
import types
import typing
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from pipeline.run.errors import ConfigError
from pipeline.run.types import JsonObject

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
GROUPS = ("model", "scale", "data")
SEEDS = ("seed", "data_seed")  # for training; for data and measurements
TOP_KEYS = (*SEEDS, *GROUPS, "runtime")
SHARED_BLOCKS = ("sandbox",)  # read by several stages
BASE_WEIGHTS = ("auto", "fp32", "bf16", "nf4")
CHECKPOINTING = ("none", "full", "every_2", "selective")
DEVICES = ("auto", "cpu", "cuda", "mps")
TRACKERS = ("tensorboard", "wandb")


@dataclass(frozen=True, kw_only=True)
class SandboxAddress:
    """`runtime.sandbox`: where generated code runs."""

    url: str | None = None
    """URL of a sandbox service (python -m pipeline.sandbox.service); none: run code on this machine."""


@dataclass(frozen=True, kw_only=True)
class SamplerAddress:
    """`runtime.sampler`: the sampling engine for stages with `sampler: server`."""

    url: str | None = None
    """URL of a server that samples for the policy (python -m pipeline.serve MODEL --rollouts .work)."""


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """The `runtime` block: how a run is executed. Read by all stages, tracked by none."""

    device: str = "auto"
    """auto: CUDA if available, else the CPU; cpu, cuda, mps (Apple GPUs: untested)."""
    precision: str = "auto"
    """auto, fp32, bf16, fp16."""
    base_weights: str = "auto"
    """Frozen matrices: fp32, bf16, or nf4 under an adapter (extra `gpu`); auto: bf16 on a GPU that trains in bf16."""
    micro_batch: int | str = "auto"
    """Rows per forward pass; auto: as many as fit in memory."""
    workers: int | str = "auto"
    """Worker processes for data stages; auto: one per core."""
    gradient_checkpointing: str = "none"
    """Which activations to recompute to save memory: none, full, every_2, selective."""
    compile: bool | str = "auto"
    """Whether to compile the layers; auto: when it pays off (learning/performance.py)."""
    pin_memory: bool | str = "auto"
    """Copy batches to the GPU through pinned memory; auto: if there is a GPU."""
    logging_steps: int = 10
    """Steps between rows of the training curve."""
    save_steps: int = 500
    """Steps between checkpoints (resumable training states)."""
    save_minutes: float = 2.0
    """Save a checkpoint at least this often, in minutes."""
    keep: int = 3
    """Number of checkpoints to keep in addition to the best one."""
    keep_models: tuple[int, ...] = ()
    """Steps after which to also export the model, as models/<stage>-<step>."""
    async_save: bool = False
    """Write checkpoints from an in-memory copy, in a background thread, while training continues."""
    profile: bool = False
    """Record a few steps with torch.profiler (learning/performance.py)."""
    find_lr: bool = False
    """Run a learning rate search instead of training; it writes a plot and a line for params.yaml."""
    trackers: tuple[str, ...] = ()
    """In addition to DVC and MLflow: tensorboard, wandb (extra `trackers`)."""
    fresh: bool = False
    """Delete this run's checkpoints and finished result before starting."""
    sandbox: SandboxAddress | None = None
    """{url: http://machine:8801}: run and judge generated code on another machine."""
    sampler: SamplerAddress | None = None
    """{url: http://127.0.0.1:8100}: the sampling engine for stages with `sampler: server`."""

    @property
    def sandbox_url(self) -> str | None:
        """`runtime.sandbox.url`; None: generated code runs on this machine."""
        return None if self.sandbox is None else self.sandbox.url

    @property
    def sampler_url(self) -> str | None:
        """`runtime.sampler.url`; None if it is not set."""
        return None if self.sampler is None else self.sampler.url

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise ValueError(f"device: expected one of {', '.join(DEVICES)}, got {self.device!r}")
        if self.precision not in ("auto", "fp32", "bf16", "fp16"):
            raise ValueError(f"precision: expected auto, fp32, bf16 or fp16, got {self.precision!r}")
        if self.base_weights not in BASE_WEIGHTS:
            raise ValueError(f"base_weights: expected one of {', '.join(BASE_WEIGHTS)}, got {self.base_weights!r}")
        if self.gradient_checkpointing not in CHECKPOINTING:
            raise ValueError(
                f"gradient_checkpointing: expected one of {', '.join(CHECKPOINTING)}, got"
                f" {self.gradient_checkpointing!r}"
            )
        for name in ("compile", "pin_memory"):
            if getattr(self, name) not in (True, False, "auto"):
                raise ValueError(f"{name}: expected auto, true or false, got {getattr(self, name)!r}")
        for name in ("micro_batch", "workers"):
            value = getattr(self, name)
            if value != "auto" and (isinstance(value, str) or value < 1):
                raise ValueError(f"{name}: expected auto or an integer of at least 1, got {value!r}")
        if unknown := sorted(set(self.trackers) - set(TRACKERS)):
            raise ValueError(f"trackers: expected only {', '.join(TRACKERS)}, got {unknown[0]!r}")
        for name, minimum in {"keep": 1, "logging_steps": 1, "save_steps": 1, "save_minutes": 0}.items():
            if getattr(self, name) < minimum:
                raise ValueError(f"{name}: expected at least {minimum}, got {getattr(self, name)}")


def group(name: str) -> Any:
    """A field filled from the selected file of a config group: `model: ModelConfig = group("model")`.

    `group("model.vocab_size")` takes a single key of the file, so only that key is tracked.
    """
    return dataclasses.field(metadata={"from": name})


def block(name: str) -> Any:
    """A field filled from another block of params.yaml: `sandbox: SandboxConfig = block("sandbox")`.

    From another stage's block it takes only the keys of the field's dataclass, so only those are tracked.
    """
    return dataclasses.field(metadata={"from": name})


def key_of(path: str, key: str) -> Any:
    """A field filled from one key of a specific file in conf/, regardless of which file of its group is selected:
    `names: list[str] = key_of("conf/data/packages.yaml", "packages")`.
    """
    return dataclasses.field(metadata={"from": f"{path}:{key}"})


@dataclass(frozen=True)
class Value:
    """A raw YAML value and its origin, for error messages."""

    raw: Any
    origin: str


class Settings:
    """The raw settings: params.yaml, the selected files in conf/, the command line."""

    def __init__(self, root: Path, overrides: list[str]) -> None:
        self.root = root
        self.params = read_yaml(root / "params.yaml")
        self.overrides = dict(parse_override(text) for text in overrides)
        self._check_top()
        self.groups = self._compose()

    def _check_top(self) -> None:
        known = {*TOP_KEYS, *SHARED_BLOCKS, *stage_names(self.root)}
        for key in self.params:
            if key not in known:
                raise ConfigError(
                    f"params.yaml: unknown key {key!r}{suggest(key, known)}; valid keys: {listing(known)}"
                )
        for key in self.overrides:
            if key.split(".")[0] not in known:
                raise ConfigError(
                    f"command line: unknown key {key!r}{suggest(key, known)}; valid keys: {listing(known)}"
                )
        for key in TOP_KEYS:
            if key not in self.params and key not in self.overrides and key != "runtime":
                raise ConfigError(f"params.yaml: {key}: missing; add it (see params.yaml in the repository)")

    def name(self, group: str) -> str:
        """The option selected for a group. Raises ConfigError if its file does not exist."""
        name = self.overrides.get(group, self.params.get(group))
        folder = self.root / "conf" / group
        options = sorted(p.stem for p in folder.glob("*.yaml"))
        if name not in options:
            raise ConfigError(
                f"params.yaml: {group}: no file {folder / f'{name}.yaml'}{suggest(str(name), options)}; "
                f"options: {listing(options)}"
            )
        return name

    def _compose(self) -> JsonObject:
        from hydra import compose, initialize_config_dir
        from omegaconf import OmegaConf

        for group in GROUPS:
            _check_mapping(self.root / "conf" / group / f"{self.name(group)}.yaml")
        with initialize_config_dir(str((self.root / "conf").resolve()), version_base=None):
            config = compose("config", overrides=[f"{group}={self.name(group)}" for group in GROUPS])
        plain = OmegaConf.to_container(config, resolve=False)
        assert isinstance(plain, dict)
        return {str(key): value for key, value in plain.items()}

    def seed(self, key: str) -> int:
        """A seed: `seed` for training, `data_seed` for data generation and evaluation."""
        origin = "command line" if key in self.overrides else "params.yaml"
        return convert(Value(self.overrides.get(key, self.params.get(key)), origin), int, key)

    def layers(self, name: str) -> dict[str, Value]:
        """The raw values of a stage's block, each from the highest-precedence layer that sets its key."""
        merged: dict[str, Value] = {}
        scale = self.name("scale")
        _merge(merged, self.groups.get(name), f"conf/scale/{scale}.yaml", name)
        own = self.params.get(name)
        preset = self.overrides.get(f"{name}.preset", own.get("preset") if isinstance(own, dict) else None)
        if preset not in (None, "none"):
            path = self.root / "conf" / "preset" / name / f"{preset}.yaml"
            if not path.is_file():
                options = listing(p.stem for p in path.parent.glob("*.yaml")) or "none"
                raise ConfigError(f"params.yaml: {name}.preset: no file {path}; options: {options}")
            _merge(merged, read_yaml(path), str(path.relative_to(self.root)), name)
        present = {key: raw for key, raw in own.items() if raw is not None} if isinstance(own, dict) else own
        _merge(merged, present, "params.yaml", name)
        merged.pop("preset", None)
        self._override(merged, name)
        return merged

    def group_values(self, group: str) -> dict[str, Value]:
        """The raw values of a group's selected file, with command-line overrides (`model.layers=2`)."""
        merged: dict[str, Value] = {}
        _merge(merged, self.groups.get(group), f"conf/{group}/{self.name(group)}.yaml", group)
        self._override(merged, group)
        return merged

    def _override(self, merged: dict[str, Value], name: str) -> None:
        for key, raw in self.overrides.items():
            first, _, rest = key.partition(".")
            if first != name or not rest or rest == "preset":
                continue
            target, _, deeper = rest.partition(".")
            if deeper:  # language.learning_rates.head=1e-3
                present = merged.get(target)
                inner = dict(present.raw) if present is not None and isinstance(present.raw, dict) else {}
                merged[target] = Value(inner | {deeper: raw}, "command line")
            else:
                merged[target] = Value(raw, "command line")


def _merge(merged: dict[str, Value], layer: object, origin: str, name: str) -> None:
    if layer is None:
        return
    if not isinstance(layer, Mapping):
        raise ConfigError(f"{origin}: {name}: expected a block of keys, got {layer!r}")
    merged |= {str(key): Value(raw, origin) for key, raw in layer.items() if raw is not None}


def read_yaml(path: Path) -> JsonObject:
    """A YAML file, parsed as DVC does (YAML 1.2). Raises ConfigError naming the offending line."""
    try:
        text = path.read_text(encoding="utf-8")
        tree = YAML(typ="safe", pure=True).load(text)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; run from the folder that contains dvc.yaml") from None
    except (YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {_fault(error)}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected a mapping of keys, found {type(tree).__name__}")
    if "${" in "\n".join(line.split("#")[0] for line in text.splitlines()):
        raise ConfigError(f"{path}: '${{...}}' is not allowed here: dvc exp run -S would freeze its value silently")
    return tree


def _check_mapping(path: Path) -> None:
    """Raise ConfigError for a file that Hydra would treat as empty, or reject with a traceback."""
    try:
        tree = yaml.load(path.read_bytes(), Loader=_unique_keys())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {_fault(error)}") from error
    if not isinstance(tree, dict | None):
        raise ConfigError(f"{path}: expected a mapping of keys, found {type(tree).__name__}")


def _fault(error: Exception) -> str:
    """A parser's message on one line, without the parser's name for the input."""
    return re.sub(r' in "<\w+ string>",', " at", " ".join(str(error).split()))


@functools.cache
def _unique_keys() -> type:
    """A YAML loader that rejects duplicate keys, as Hydra does."""

    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class Loader(base):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            if repeated := [key for key, count in Counter(keys).items() if count > 1]:
                raise yaml.constructor.ConstructorError(
                    None, None, f"found duplicate key {repeated[0]!r}", node.start_mark
                )
            return super().construct_mapping(node, deep)

    return Loader


def parse_override(text: str) -> tuple[str, Any]:
    """`language.steps=3` -> ("language.steps", 3). Raises ConfigError if there is no `=`."""
    key, equals, raw = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"command line: expected key=value such as language.steps=3, got {text!r}")
    try:
        return key, yaml.safe_load(raw) if raw else ""
    except yaml.YAMLError as error:
        raise ConfigError(f"command line: {key}: not valid YAML: {raw!r}") from error


def stage_names(root: Path) -> list[str]:
    """The names of the stages: the modules in stages/."""
    return sorted(p.stem for p in (root / "stages").glob("*.py") if p.stem != "__init__")


def suggest(key: str, known: Iterable[str]) -> str:
    """` (did you mean ...?)` if a valid key is similar, else an empty string."""
    close = difflib.get_close_matches(key, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def listing(names: Iterable[str]) -> str:
    """The sorted names, separated by commas, for a message."""
    return ", ".join(sorted(names))


def without_password(url: str) -> str:
    """A URL for messages: everything before its last @ is removed."""
    return re.sub(r"^([A-Za-z][\w+.-]*://)?.*@", r"\1", url, flags=re.DOTALL)


def is_flat(kind: object) -> bool:
    """Whether a field's type is a bare dataclass, so its keys belong directly to the stage's block."""
    return dataclasses.is_dataclass(kind)


def as_written(parameters: DataclassInstance) -> JsonObject:
    """A stage's Params as a dict with the keys of its block: flat fields inlined, other blocks nested by name."""
    hints, plain = typing.get_type_hints(type(parameters)), dataclasses.asdict(parameters)
    written: JsonObject = {}
    for field in dataclasses.fields(parameters):
        if is_flat(hints[field.name]) and "from" not in field.metadata:
            written |= as_written(getattr(parameters, field.name))
        else:
            written[field.name] = plain[field.name]
    return written


def build(kind: type[T], values: dict[str, Value], where: str, settings: Settings | None = None) -> T:
    """Build a dataclass from raw values. Raises ConfigError for an unknown key, a wrong type or a missing value."""
    hints = typing.get_type_hints(kind)
    known = _valid_keys(kind)
    for key, value in values.items():
        if key not in known:
            valid = listing(known) or "(none)"
            raise ConfigError(f"{value.origin}: {where}: unknown key {key!r}{suggest(key, known)}; valid keys: {valid}")
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        source = field.metadata.get("from")
        if source is not None:
            assert settings is not None, f"{where}.{field.name}: group and block fields belong to a stage's Params"
            arguments[field.name] = _value_of_source(source, hints[field.name], settings)
        elif is_flat(hints[field.name]):
            inner = {key: value for key, value in values.items() if key in _valid_keys(hints[field.name])}
            arguments[field.name] = build(hints[field.name], inner, where)
        elif field.name in values:
            arguments[field.name] = convert(values[field.name], hints[field.name], f"{where}.{field.name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(
                f"params.yaml: {where}.{field.name}: missing: expected {type_name(hints[field.name])}; "
                "set it in params.yaml or in the selected files in conf/"
            )
    try:
        return kind(**arguments)
    except ConfigError:
        raise
    except ValueError as error:
        origins = sorted({value.origin for value in values.values()}) or ["params.yaml"]
        raise ConfigError(f"{', '.join(origins)}: {where}: {error}") from error


def _value_of_source(source: str, kind: object, settings: Settings) -> object:
    """The value of a `group`, `block` or `key_of` field."""
    if source.startswith("conf/"):
        path, _, key = source.partition(":")
        tree = read_yaml(settings.root / path)
        if key not in tree:
            raise ConfigError(f"{path}: {key}: missing: expected {type_name(kind)}")
        return convert(Value(tree[key], path), kind, key)
    name, _, key = source.partition(".")
    values = settings.group_values(name) if name in GROUPS else settings.layers(name)
    if not key:
        assert isinstance(kind, type) and dataclasses.is_dataclass(kind)
        if name in stage_names(settings.root):
            values = {inner: value for inner, value in values.items() if inner in _valid_keys(kind)}
        return build(kind, values, name)
    if key not in values:
        file = f"conf/{name}/{settings.name(name)}.yaml: {key}" if name in GROUPS else f"params.yaml: {source}"
        raise ConfigError(f"{file}: missing: expected {type_name(kind)}")
    return convert(values[key], kind, source)


def _valid_keys(kind: type[DataclassInstance]) -> set[str]:
    hints = typing.get_type_hints(kind)
    keys: set[str] = set()
    for field in dataclasses.fields(kind):
        if field.metadata.get("from") is not None:
            continue
        inner = _valid_keys(hints[field.name]) if is_flat(hints[field.name]) else {field.name}
        assert not keys & inner, f"{kind.__name__}: {keys & inner} appear in two places"
        keys |= inner
    return keys


def type_name(kind: object) -> str:
    """A type's name for messages: `float`, `int or none`, `list[str]`."""
    if kind is type(None):
        return "none"
    if isinstance(kind, types.UnionType):
        return " or ".join(type_name(k) for k in typing.get_args(kind))
    if typing.get_origin(kind) is typing.Literal:
        return " or ".join(map(str, typing.get_args(kind)))
    if typing.get_origin(kind) is list:
        return f"list[{type_name(typing.get_args(kind)[0])}]"
    return str(kind) if typing.get_args(kind) else getattr(kind, "__name__", str(kind))


def convert(value: Value, kind: object, where: str) -> Any:
    """Convert a raw YAML value to `kind`; floats accept integers and strings such as "1e-3". Raises ConfigError."""
    raw, wrong = value.raw, f'{value.origin}: {where}: expected {type_name(kind)}, got "{value.raw}"'
    if isinstance(kind, types.UnionType):
        blocks = [option for option in typing.get_args(kind) if dataclasses.is_dataclass(option)]
        if blocks and isinstance(raw, Mapping):  # the block's own message is more precise than "expected this or that"
            return convert(value, _meant(blocks, raw), where)
        for option in typing.get_args(kind):
            try:
                return convert(value, option, where)
            except ConfigError:
                continue
        raise ConfigError(wrong)
    if dataclasses.is_dataclass(kind):
        if not isinstance(raw, Mapping):
            raise ConfigError(wrong)
        return build(typing.cast(type, kind), {str(k): Value(v, value.origin) for k, v in raw.items()}, where)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is list and isinstance(raw, list | tuple):
        return [convert(Value(r, value.origin), inner[0], f"{where}[{i}]") for i, r in enumerate(raw)]
    if origin is tuple and isinstance(raw, list | tuple):
        return tuple(convert(Value(r, value.origin), inner[0], f"{where}[{i}]") for i, r in enumerate(raw))
    if origin is dict and isinstance(raw, Mapping):
        return {str(k): convert(Value(v, value.origin), inner[1], f"{where}.{k}") for k, v in raw.items()}
    if kind is float and isinstance(raw, int | float | str) and not isinstance(raw, bool):
        try:
            return float(raw)
        except ValueError:
            raise ConfigError(wrong) from None
    if origin is typing.Literal and raw in inner:
        return raw
    if kind is type(None) and raw in (None, "none"):
        return None
    if kind is Any or (kind is bool and isinstance(raw, bool)) or (kind is str and isinstance(raw, str)):
        return raw
    if kind is int and isinstance(raw, int) and not isinstance(raw, bool):
        return raw
    raise ConfigError(wrong)


def _meant(blocks: list[Any], raw: Mapping[str, object]) -> object:
    """The dataclass that matches the most keys; matching the value of a `Literal` key matters most."""

    def fit(block: Any) -> tuple[int, bool]:
        hints, valid = typing.get_type_hints(block), _valid_keys(block)
        known = [key for key in map(str, raw) if key in valid]
        options = {key: typing.get_args(hints[key]) for key in known if typing.get_origin(hints[key]) is typing.Literal}
        wrong = [key for key, values in options.items() if raw[key] not in values]
        return 2 * len(known) - len(raw) - 2 * len(wrong), bool(known)

    return max(blocks, key=fit)  # in a tie, the first


def stage_params(stage: str, settings: Settings) -> Any:
    """The Params of a stage. Raises ConfigError."""
    module = importlib.import_module(f"stages.{stage}")
    return build(module.Params, settings.layers(stage), stage, settings)


def resolve(kind: type[T], settings: Settings, stage: str) -> tuple[T, Runtime]:
    """Build Params and Runtime for a run of `stage`. Raises ConfigError."""
    parameters = build(kind, settings.layers(stage), stage, settings)
    return parameters, build(Runtime, settings.layers("runtime"), "runtime")


def check(argv: list[str]) -> int:
    """`python -m pipeline.run.config`: build the parameters of every stage, to catch typos and globs without
    matches before DVC deletes outs.
    """
    sys.path.insert(0, str(Path.cwd()))
    faults = 0
    try:
        settings = Settings(Path(), argv)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    for name in [*stage_names(Path()), "runtime"]:
        try:
            if name == "runtime":
                build(Runtime, settings.layers(name), name)
                continue
            preflight = getattr(stage_params(name, settings), "preflight", None)
            if messages := preflight(Path()) if preflight else []:
                raise ConfigError("\n".join(messages))
        except ConfigError as error:
            sys.stderr.write(f"{error}\n")
            faults = error.exit_code
    if not faults:
        sys.stderr.write(f"parameters of {len(stage_names(Path()))} stages: ok\n")
    return faults


if __name__ == "__main__":
    sys.exit(check(sys.argv[1:]))
