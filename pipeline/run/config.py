"""params.yaml + conf/ + command line -> frozen dataclasses, strictly; and `main`, which runs a stage.

The value of a key, first found wins: command line, what is not null in params.yaml, the stage's preset
(`conf/preset/<stage>/<name>.yaml`), its block of the scale file, the dataclass default. Groups are names in params.yaml
(`model: nano`); Hydra's compose API reads the files they name. An unknown key, a missing key or a wrong type raises
ConfigError naming file, block, key and the valid keys.

    python -m stages.language language.steps=3 runtime.fresh=true     one stage, without DVC
    python -m stages.language --help                                  every key: type, value, where it is from, meaning
    python -m pipeline.run.config                                         checks the parameters of all stages

Not promised: interpolation (`${...}` in params.yaml is refused: the first `dvc exp run -S` would freeze it).

The `runtime` block of params.yaml: how a run is carried out. All stages read it and none tracks it, because none of it
changes more of a result than its rounding.

Not promised: equal bits between two precisions, micro-batches or process counts, or between compiled and eager layers;
a resumed run that changes one of them says so.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import re
import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from pipeline.run.errors import ConfigError

CHECKPOINTING = ("none", "full", "every_2", "selective")
DEVICES = ("auto", "cpu", "cuda", "mps")
TRACKERS = ("tensorboard", "wandb")


def without_password(url: str) -> str:
    """An address as messages show it: what stands before its last @ is left out."""
    return re.sub(r"^([A-Za-z][\w+.-]*://)?.*@", r"\1", url, flags=re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class SandboxAddress:
    """`runtime.sandbox`: where generated code runs."""

    url: str | None = None
    """Of a sandbox service (python -m pipeline.sandbox.service); none: this machine."""


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """The `runtime` block: read by all stages, tracked by none, because none of it changes more of a result than its
    rounding.
    """

    device: str = "auto"
    """auto: CUDA where there is one, else the CPU; cpu, cuda, mps (Apple's GPU: untested)."""
    precision: str = "auto"
    """auto, fp32, bf16, fp16."""
    micro_batch: int | str = "auto"
    """Rows in one forward pass; auto: what fits the memory."""
    workers: int | str = "auto"
    """Processes of the data stages; auto: one per core."""
    gradient_checkpointing: str = "none"
    """none, full, every_2, selective: recompute activations to save memory."""
    compile: bool | str = "auto"
    """The layers; auto: where it pays (learning/performance.py)."""
    pin_memory: bool | str = "auto"
    """Batches in page-locked memory on their way to a GPU; auto: where there is one."""
    logging_steps: int = 10
    """A row of the curve every so many steps."""
    save_steps: int = 500
    """A resumable state every so many steps."""
    save_minutes: float = 2.0
    """A resumable state every so many minutes, too."""
    keep: int = 3
    """How many states are kept besides the best."""
    async_save: bool = False
    """Write states in a thread, from a copy in memory, while training goes on."""
    profile: bool = False
    """Record some steps with torch.profiler (learning/performance.py)."""
    find_lr: bool = False
    """Train nothing: look for a learning rate, write a plot and a line for params.yaml."""
    trackers: tuple[str, ...] = ()
    """Besides DVC and MLflow: tensorboard, wandb (the extra `trackers`)."""
    fresh: bool = False
    """Throw away the state and the finished result of this key first."""
    sandbox: SandboxAddress | None = None
    """{url: http://machine:8801}: judge generated code on another machine."""

    @property
    def sandbox_url(self) -> str | None:
        """`runtime.sandbox.url`; None: generated code runs on this machine."""
        return None if self.sandbox is None else self.sandbox.url

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise ValueError(f"device: expected one of {', '.join(DEVICES)}, got {self.device!r}")
        if self.precision not in ("auto", "fp32", "bf16", "fp16"):
            raise ValueError(f"precision: expected auto, fp32, bf16 or fp16, got {self.precision!r}")
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
                raise ValueError(f"{name}: expected auto or a number from 1 on, got {value!r}")
        if odd := sorted(set(self.trackers) - set(TRACKERS)):
            raise ValueError(f"trackers: expected some of {', '.join(TRACKERS)}, got {odd[0]!r}")
        for name, least in {"keep": 1, "logging_steps": 1, "save_steps": 1, "save_minutes": 0}.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name}: expected at least {least}, got {getattr(self, name)}")


# -- params ------------------------------------------------------------------------------------------------------------


GROUPS = ("model", "scale", "data")
SEEDS = ("seed", "data_seed")  # of training; of the data and of what is measured
TOP_KEYS = (*SEEDS, *GROUPS, "runtime")
T = TypeVar("T")


def group(name: str) -> Any:
    """A field filled from the selected file of a config group: `model: ModelConfig = group("model")`.

    `group("model.vocab_size")` takes one key of it, so that only this key is tracked.
    """
    return dataclasses.field(metadata={"from": name})


def block(name: str) -> Any:
    """A field filled from another block of params.yaml: `sandbox: SandboxConfig = block("sandbox")`.

    Of another stage's block it takes the keys of the field's dataclass alone, so that only these are tracked.
    """
    return dataclasses.field(metadata={"from": name})


@dataclass(frozen=True)
class Value:
    """A raw value and the place it was read from, for messages."""

    raw: Any
    origin: str


class Settings:
    """Everything that was written down: params.yaml, the selected files of conf/, the command line."""

    def __init__(self, root: Path, overrides: list[str]) -> None:
        self.root = root
        self.params = read_yaml(root / "params.yaml")
        self.overrides = dict(parse_override(text) for text in overrides)
        self._check_top()
        self.groups = self._compose()

    def _check_top(self) -> None:
        known = {*TOP_KEYS, *stage_names(self.root), *extra_blocks(self.root)}
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

    def name(self, which: str) -> str:
        """The option selected for a group. Raises ConfigError when there is no such file."""
        name = self.overrides.get(which, self.params.get(which))
        folder = self.root / "conf" / which
        have = sorted(p.stem for p in folder.glob("*.yaml"))
        if name not in have:
            raise ConfigError(
                f"params.yaml: {which}: no file {folder / f'{name}.yaml'}{suggest(str(name), have)}; "
                f"options: {listing(have)}"
            )
        return name

    def _compose(self) -> dict[str, Any]:
        from hydra import compose, initialize_config_dir
        from omegaconf import OmegaConf

        for which in GROUPS:
            _check_mapping(self.root / "conf" / which / f"{self.name(which)}.yaml")
        with initialize_config_dir(str((self.root / "conf").resolve()), version_base=None):
            config = compose("config", overrides=[f"{which}={self.name(which)}" for which in GROUPS])
        plain = OmegaConf.to_container(config, resolve=False)
        assert isinstance(plain, dict)
        return {str(key): value for key, value in plain.items()}

    def seed(self, key: str) -> int:
        """What draws begin from: `seed` those of training, `data_seed` those that make data and measure."""
        origin = "command line" if key in self.overrides else "params.yaml"
        return convert(Value(self.overrides.get(key, self.params.get(key)), origin), int, key)

    def layers(self, name: str) -> dict[str, Value]:
        """The raw keys of a stage's block, each from the highest layer that gives it."""
        merged: dict[str, Value] = {}
        scale = self.name("scale")
        _merge(merged, self.groups.get(name), f"conf/scale/{scale}.yaml", name)
        own = self.params.get(name)
        preset = self.overrides.get(f"{name}.preset", own.get("preset") if isinstance(own, dict) else None)
        if preset not in (None, "none"):
            path = self.root / "conf" / "preset" / name / f"{preset}.yaml"
            if not path.is_file():
                have = listing(sorted(p.stem for p in path.parent.glob("*.yaml"))) or "none"
                raise ConfigError(f"params.yaml: {name}.preset: no file {path}; options: {have}")
            _merge(merged, read_yaml(path), str(path.relative_to(self.root)), name)
        present = {key: raw for key, raw in own.items() if raw is not None} if isinstance(own, dict) else own
        _merge(merged, present, "params.yaml", name)
        merged.pop("preset", None)
        self._override(merged, name)
        return merged

    def group_values(self, which: str) -> dict[str, Value]:
        """The keys of a group's selected file, with command-line changes (`model.layers=2`)."""
        merged: dict[str, Value] = {}
        _merge(merged, self.groups.get(which), f"conf/{which}/{self.name(which)}.yaml", which)
        self._override(merged, which)
        return merged

    def _override(self, merged: dict[str, Value], name: str) -> None:
        for key, raw in self.overrides.items():
            first, _, rest = key.partition(".")
            if first != name or not rest or rest == "preset":
                continue
            target, _, deeper = rest.partition(".")
            if deeper:  # language.learning_rates.head=1e-3
                before = merged.get(target)
                inner = dict(before.raw) if before is not None and isinstance(before.raw, dict) else {}
                merged[target] = Value(inner | {deeper: raw}, "command line")
            else:
                merged[target] = Value(raw, "command line")


def _merge(merged: dict[str, Value], layer: object, origin: str, name: str) -> None:
    if layer is None:
        return
    if not isinstance(layer, Mapping):
        raise ConfigError(f"{origin}: {name}: expected a block of keys, got {layer!r}")
    merged |= {str(key): Value(raw, origin) for key, raw in layer.items() if raw is not None}


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file as DVC reads it (YAML 1.2). Raises ConfigError with the line of a fault."""
    try:
        text = path.read_text(encoding="utf-8")
        tree = YAML(typ="safe", pure=True).load(text)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; run from the folder of dvc.yaml") from None
    except (YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected a mapping of keys, found {type(tree).__name__}")
    if "${" in "\n".join(line.split("#")[0] for line in text.splitlines()):
        raise ConfigError(f"{path}: '${{...}}' is not allowed here: dvc exp run -S would freeze its value silently")
    return tree


def _check_mapping(path: Path) -> None:
    """Raise ConfigError for a file that Hydra would read as nothing, or refuse with a traceback."""
    try:
        tree = yaml.load(path.read_bytes(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict | None):
        raise ConfigError(f"{path}: expected a mapping of keys, found {type(tree).__name__}")


def parse_override(text: str) -> tuple[str, Any]:
    """`language.steps=3` -> ("language.steps", 3). Raises ConfigError when there is no `=`."""
    key, equals, raw = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"command line: expected key=value such as language.steps=3, got {text!r}")
    try:
        return key, yaml.safe_load(raw) if raw else ""
    except yaml.YAMLError as error:
        raise ConfigError(f"command line: {key}: not valid YAML: {raw!r}") from error


def stage_names(root: Path) -> list[str]:
    """The stages that exist: the modules in stages/."""
    return sorted(p.stem for p in (root / "stages").glob("*.py") if p.stem != "__init__")


def extra_blocks(root: Path) -> set[str]:
    """Blocks of params.yaml that stages read besides their own: found in their `block(...)` fields."""
    found = set()
    for path in (root / "stages").glob("*.py"):
        text = path.read_text(encoding="utf-8")
        found |= {piece.split('"')[0] for piece in text.split('block("')[1:]}
    return found


def suggest(key: str, known: typing.Iterable[str]) -> str:
    """`, did you mean ...?` where a valid key is close."""
    close = difflib.get_close_matches(key, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def listing(names: typing.Iterable[str]) -> str:
    """Names as a sorted list for a message."""
    return ", ".join(sorted(names))


def is_flat(kind: Any) -> bool:
    """Whether a field's type is a bare dataclass: its keys then stand flat in the stage's block."""
    return dataclasses.is_dataclass(kind)


def as_written(parameters: Any) -> dict[str, Any]:
    """A stage's Params by the keys of its block: what stands flat there is flat here, blocks of elsewhere have their
    names.
    """
    hints, plain = typing.get_type_hints(type(parameters)), dataclasses.asdict(parameters)
    found: dict[str, Any] = {}
    for field in dataclasses.fields(parameters):
        if is_flat(hints[field.name]) and "from" not in field.metadata:
            found |= as_written(getattr(parameters, field.name))
        else:
            found[field.name] = plain[field.name]
    return found


def build(kind: type[T], values: dict[str, Value], where: str, settings: Settings | None = None) -> T:
    """Make the dataclass from raw values: every key known, every type right, nothing missing. Raises ConfigError."""
    hints = typing.get_type_hints(kind)
    known = _valid_keys(kind)
    for key, value in values.items():
        if key not in known:
            valid = listing(known) or "(none)"
            raise ConfigError(f"{value.origin}: {where}: unknown key {key!r}{suggest(key, known)}; valid keys: {valid}")
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        source = field.metadata.get("from")
        if source is not None:
            assert settings is not None, f"{where}.{field.name}: group and block fields belong to a stage's Params"
            arguments[field.name] = _from_elsewhere(hints[field.name], source, settings)
        elif is_flat(hints[field.name]):
            inner = {key: value for key, value in values.items() if key in _valid_keys(hints[field.name])}
            arguments[field.name] = build(hints[field.name], inner, where)
        elif field.name in values:
            arguments[field.name] = convert(values[field.name], hints[field.name], f"{where}.{field.name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(
                f"params.yaml: {where}.{field.name}: missing: expected {type_name(hints[field.name])}; "
                "set it in params.yaml or in the selected files of conf/"
            )
    try:
        return kind(**arguments)
    except ConfigError:
        raise
    except ValueError as error:
        origins = sorted({value.origin for value in values.values()}) or ["params.yaml"]
        raise ConfigError(f"{', '.join(origins)}: {where}: {error}") from error


def _from_elsewhere(kind: Any, source: str, settings: Settings) -> Any:
    name, _, key = source.partition(".")
    values = settings.group_values(name) if name in GROUPS else settings.layers(name)
    if not key:
        if name in stage_names(settings.root):
            values = {inner: value for inner, value in values.items() if inner in _valid_keys(kind)}
        return build(kind, values, name)
    if key not in values:
        raise ConfigError(f"conf/{name}/{settings.name(name)}.yaml: {key}: missing: expected {type_name(kind)}")
    return convert(values[key], kind, source)


def _valid_keys(kind: Any) -> set[str]:
    hints = typing.get_type_hints(kind)
    keys: set[str] = set()
    for field in dataclasses.fields(kind):
        if field.metadata.get("from") is not None:
            continue
        inner = _valid_keys(hints[field.name]) if is_flat(hints[field.name]) else {field.name}
        assert not keys & inner, f"{kind.__name__}: {keys & inner} stand in two places"
        keys |= inner
    return keys


def type_name(kind: Any) -> str:
    """A type as a person reads it: `float`, `int or none`, `list[str]`."""
    if kind is type(None):
        return "none"
    if isinstance(kind, types.UnionType):
        return " or ".join(type_name(k) for k in typing.get_args(kind))
    return str(kind) if typing.get_args(kind) else getattr(kind, "__name__", str(kind))


def convert(value: Value, kind: Any, where: str) -> Any:
    """A raw YAML value as `kind`; floats accept integers and text such as "1e-3". Raises ConfigError."""
    raw, wrong = value.raw, f'{value.origin}: {where}: expected {type_name(kind)}, got "{value.raw}"'
    if isinstance(kind, types.UnionType):
        for option in typing.get_args(kind):
            if dataclasses.is_dataclass(option) and isinstance(raw, Mapping):
                return convert(value, option, where)  # its own message says more than "expected this or that"
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
    if kind is type(None) and raw in (None, "none"):
        return None
    if kind is Any or (kind is bool and isinstance(raw, bool)) or (kind is str and isinstance(raw, str)):
        return raw
    if kind is int and isinstance(raw, int) and not isinstance(raw, bool):
        return raw
    raise ConfigError(wrong)


def stage_params(stage: str, settings: Settings) -> Any:
    """The Params of a stage, built; ConfigError where something is wrong."""
    module = importlib.import_module(f"stages.{stage}")
    return build(module.Params, settings.layers(stage), stage, settings)


def resolve(kind: Any, settings: Settings, stage: str) -> tuple[Any, Runtime]:
    """Params and Runtime for a run of `stage`."""
    parameters = build(kind, settings.layers(stage), stage, settings)
    return parameters, build(Runtime, settings.layers("runtime"), "runtime")


def main(run: Any, **wiring: Any) -> None:
    """Run a stage from the command line; see `pipeline.run.stage.main` for the wiring. Exits with the code of
    errors.py.
    """
    from pipeline.run.stage import main as run_stage

    run_stage(run, **wiring)


def check(argv: list[str]) -> int:
    """`python -m pipeline.run.config`: build the parameters of every stage, so that a typo is found before DVC
    deletes outs.
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
            build(Runtime, settings.layers(name), name) if name == "runtime" else stage_params(name, settings)
        except ConfigError as error:
            sys.stderr.write(f"{error}\n")
            faults = error.exit_code
    if not faults:
        sys.stderr.write(f"parameters of {len(stage_names(Path()))} stages: ok\n")
    return faults


if __name__ == "__main__":
    sys.exit(check(sys.argv[1:]))
