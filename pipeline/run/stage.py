"""Everything around a stage's `run`: arguments, key, lock, resuming, tracking, publishing, exit codes.

    main(run, inputs={...}, outs={...})        at the end of every stages/<s>.py, called through pipeline.run.config

A run with a finished key is only exported; an unfinished one resumes. Outs are published atomically. Exit codes: 0
success, 2 invalid configuration or input, 3 a failed gate, 128 + signal when stopped, 1 anything else
(`pipeline/run/errors.py`).
"""

from __future__ import annotations

import ast
import dataclasses
import errno
import inspect
import itertools
import os
import signal
import sys
import textwrap
import time
import typing
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pipeline.run import codehash, cost, device, graph, processes, tracking, workdir
from pipeline.run.config import Runtime, Settings, Value, as_written, is_flat, parse_override, resolve, type_name
from pipeline.run.errors import ConfigError, InputError, StagecoachError
from pipeline.run.types import JsonObject

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ANY = ("*",)
LOGS = Path("logs")  # for watching a stage while it runs; not in any out, and not in git
RESUME = "--resume"
WIDEST = 40  # maximum length of a value in a stage's summary
WITHOUT_TORCH = ("corpus", "tasks", "encode")
SHOWN = ("seed", "data_seed", "scale", "model", "data")  # also shown in MLflow, from params.yaml


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wiring:
    """The paths of a stage's inputs and outs, relative to dvc.yaml, and how the stage runs.

    In a path, `{item}` stands for the matrix item, and `{key}` for the value of that string key of the parameters.
    """

    inputs: dict[str, str]
    outs: dict[str, str]
    items: tuple[str, ...] = ()  # matrix items; ANY: any identifier
    optional: tuple[str, ...] = ()  # inputs that may be absent
    chosen: Callable[..., dict[str, str]] | None = None  # additional inputs that depend on the stage's Params
    of_item: Callable[[str], tuple[str, ...]] | None = None  # the inputs that an item reads; None: all of them
    seed: str = "seed"  # the seed it uses; "data_seed" for a stage that generates data or evaluates
    metrics: str | None = "metrics/{name}.json"  # the final numbers; None: the stage writes its own
    trains: bool = False  # has a curve and metrics for `dvc metrics show`, and may run in several processes


def main(run: Callable[..., None], **wiring: Any) -> None:
    """Run a stage as a command and exit. `wiring`: the fields of Wiring."""
    start = time.monotonic()
    module = sys.modules[run.__module__]
    stage = Path(inspect.getfile(run)).stem
    _write_exit_code(1)  # until the real one is known, in case of an exception or a kill
    try:
        _logged(run, module, stage, Wiring(**wiring), sys.argv[1:], start)
    except StagecoachError as error:
        _complain(f"stage_{stage}{_rank_suffix()}: {error}")
        _exit(error.exit_code)
    except RuntimeError as error:
        if not device.is_lost_peer(error):
            raise
        first = str(error).splitlines()[0][:200]
        _complain(f"stage_{stage}{_rank_suffix()}: another process of this run is gone: {first}. Rerun to resume")
        _exit(1)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _complain(
            f"stage_{stage}: no space left on the device of {error.filename or 'the work folder'}. Nothing was"
            " published; free some space (python -m pipeline.run.workdir prune removes unfinished work), then rerun"
            " to resume."
        )
        _exit(1)
    except workdir.Stopped as end:
        _complain(f"stage_{stage}{_rank_suffix()}: stopped by {end.name} outside the training loop; rerun to resume")
        _exit(end.status)
    except KeyboardInterrupt:  # data stages; a training stage handles the signal itself
        _complain(f"stage_{stage}: interrupted; rerun to resume")
        _exit(128 + signal.SIGINT)
    _exit(0)


def _logged(*arguments: Any) -> None:
    """`_run`, with the traceback of unexpected exceptions in the log."""
    try:
        _run(*arguments)
    except StagecoachError:
        raise
    except Exception:
        tracking.LOG.info("failed", exc_info=True)
        raise


def _complain(text: str) -> None:
    """Write the reason for stopping to stderr and the log."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
    tracking.LOG.info("%s", text)


def _write_exit_code(code: int) -> None:
    """Write the exit code for `pipeline.tools.launch`: DVC reports only that its command failed."""
    path = os.environ.get("STAGECOACH_ENDED")
    if path and "LOCAL_RANK" not in os.environ:
        with suppress(OSError):
            Path(path).write_text(str(code))


def _rank_suffix() -> str:
    return f" (rank {device.rank()})" if device.rank() else ""


def _exit(code: int) -> typing.NoReturn:
    sys.stdout.flush()
    _write_exit_code(code)
    sys.exit(code)


def _run(
    run: Callable[..., None], module: ModuleType, stage: str, wiring: Wiring, argv: list[str], start: float
) -> None:
    if {"-h", "--help"} & set(argv):
        sys.stdout.write(help_text(module, stage, wiring))
        return
    if "DVC_STAGE" in os.environ or "LOCAL_RANK" in os.environ:  # started by dvc, or by this worker's launcher
        processes.die_with_parent(os.getppid())
    item, overrides, resumed = split_arguments(argv, stage, wiring)
    settings = Settings(Path(), overrides)
    parameters, runtime = resolve(module.Params, settings, stage)
    if runtime.device != "auto":
        device.request_kind(runtime.device)
    names = {key: value for key, value in vars(parameters).items() if isinstance(value, str)}  # {model} in stage deploy
    names |= {"item": item or "", "name": f"{stage}_{item}" if item else stage}
    extra_inputs = wiring.chosen(parameters) if wiring.chosen else {}
    keys = wiring.of_item(item) if wiring.of_item and item else tuple(wiring.inputs)
    inputs = {key: Path(wiring.inputs[key].format(**names)) for key in keys}
    inputs |= {key: Path(path) for key, path in extra_inputs.items()}
    _check_inputs(inputs, wiring.optional)
    name = f"{stage}@{item}" if item else stage
    resolved, seed = dataclasses.asdict(parameters), settings.seed(wiring.seed)
    lineage = _lineage(stage, item, seed, resolved, inputs)
    folder = workdir.root() / name / lineage["key"]
    if runtime.find_lr:
        folder = _finder_folder(folder, stage, wiring)
    plan = processes.plan() if wiring.trains else None
    is_follower = plan is not None and plan.machine > 0  # machine 0 locks, starts over and publishes
    if device.rank() == 0 and not is_follower:
        workdir.need_writable(folder / "lock", *(target for target, _ in out_paths(folder, wiring, names)))
    if is_follower:
        os.environ["STAGECOACH_LOCKED"] = str(folder)
    if device.rank() == 0:
        tracking.log_to(LOGS / f"{name}.log")
    with workdir.locked(folder):
        if runtime.fresh and device.rank() == 0 and "STAGECOACH_LOCKED" not in os.environ:
            workdir.start_over(folder)
        elif resumed is not None and device.rank() == 0 and "STAGECOACH_LOCKED" not in os.environ:
            workdir.back_to(folder, resumed)
        if workdir.is_finished(folder):
            again = f"python -m stages.{' '.join(filter(None, (stage, item)))} runtime.fresh=true"
            tracking.say(f"{name}: already computed (key {lineage['key']}) and exported. To recompute, run {again}")
            absent = [n for n in runtime.keep_models if not (folder / f"out/models/{names['name']}-{n}").is_dir()]
            if wiring.trains and absent:
                tracking.say(
                    f"{name}: the model of step {absent[0]} was not kept: retrain with runtime.fresh=true to keep it"
                )
        else:
            number = 1 if plan is None else 0 if plan.on_cpu else plan.processes
            if number and stage not in WITHOUT_TORCH and (shared := device.claim_gpus(number)):
                tracking.say(f"{name}: {shared}")
            if plan is not None:
                os.environ["STAGECOACH_LOCKED"] = str(folder)
                _exit(processes.run_workers(plan, f"stages.{stage}", argv))
            top = settings.params | settings.overrides
            written = {stage: as_written(parameters)} | {key: top[key] for key in SHOWN if key in top}
            job = _make_job(stage, item, seed, written, runtime, folder, lineage)
            job = dataclasses.replace(job, family=_family(stage, item, seed, parameters, lineage))
            _compute(run, job, parameters, inputs, wiring, names, start)
        if device.rank() == 0 and not is_follower:
            for target, source in out_paths(folder, wiring, names):
                workdir.publish(source, target)
            workdir.prune_finished(folder.parent, lineage["key"])


def _family(stage: str, item: str | None, seed: int, parameters: DataclassInstance, lineage: JsonObject) -> str:
    """A key that ignores settings that change only the number of steps; empty if the stage has none."""
    fit = getattr(parameters, "fit", None)
    lengths = getattr(fit, "length_keys", ())
    if fit is None or not lengths:
        return ""
    values = dataclasses.asdict(parameters)
    values["fit"] = {key: value for key, value in values["fit"].items() if key not in lengths}
    return workdir.canonical_hash([stage, item, seed, values, lineage["inputs"], lineage["code"]])


def _finder_folder(folder: Path, stage: str, wiring: Wiring) -> Path:
    """The work folder of a learning rate search, next to the run's own. Raises ConfigError."""
    if not wiring.trains:
        raise ConfigError(f"runtime.find_lr: stage_{stage} trains nothing; set it only for a stage that trains")
    if os.environ.get("DVC_STAGE"):
        raise ConfigError(
            "runtime.find_lr: a search writes no outs for DVC; remove the key from params.yaml and run "
            f"python -m stages.{stage} runtime.find_lr=true"
        )
    return folder.with_name(f"{folder.name}-find-lr")


def _compute(
    run: Callable[..., None],
    job: workdir.Job,
    parameters: DataclassInstance,
    inputs: dict[str, Path],
    wiring: Wiring,
    names: dict[str, str],
    start: float,
) -> None:
    folder = job.folder
    outs = {key: folder / "out" / path.format(**names) for key, path in wiring.outs.items()}
    if device.rank() == 0:
        for path in outs.values():
            path.parent.mkdir(parents=True, exist_ok=True)
            workdir.remove(path)  # a killed run may have left it half-written
    if wiring.trains:
        job.stop.install()
    with cost.measured(folder, start) if device.rank() == 0 else nullcontext() as usage:
        try:
            run(parameters, job, **inputs, **outs)
        except BaseException as error:
            job.tracker.abandon("KILLED" if isinstance(error, SystemExit | KeyboardInterrupt) else "FAILED")
            raise
    if usage is None:  # another rank
        return
    if wiring.metrics:
        written = as_written(parameters) | {wiring.seed: job.seed}
        final = job.tracker.final | {"lineage": job.lineage, "params": written}
        tracking.write_json(folder / "out" / wiring.metrics.format(**names), final)
    if wiring.trains:
        tracking.write_curve(folder / "out" / f"metrics/{names['name']}.csv", job.tracker.rows)
        tracking.write_json(folder / "out" / f"metrics/training/{names['name']}.json", job.tracker.headlines())
    job.tracker.speed |= usage.totals()
    workdir.mark_finished(folder)
    workdir.drop_states(folder)
    job.tracker.finish(usage.samples)
    workdir.remove(folder / "usage.json")  # speed.json has the totals now
    tracking.say(summary(job, time.monotonic() - start))


def out_paths(folder: Path, wiring: Wiring, names: dict[str, str]) -> list[tuple[Path, Path]]:
    """(target, source) for everything that a finished key publishes."""
    paths = [path.format(**names) for path in wiring.outs.values()]
    if wiring.metrics:
        paths.append(wiring.metrics.format(**names))
    if wiring.trains:
        paths += [f"metrics/{names['name']}.csv", f"metrics/training/{names['name']}.json"]
        kept = (folder / "out/models").glob(f"{names['name']}-*")  # from runtime.keep_models
        paths += sorted(f"models/{path.name}" for path in kept if path.name.rpartition("-")[2].isdecimal())
    return [(Path(path), folder / "out" / path) for path in paths]


def split_arguments(argv: list[str], stage: str, wiring: Wiring) -> tuple[str | None, list[str], int | None]:
    """The matrix item, the key=value overrides, the step of `--resume STEP`. Raises ConfigError for anything else."""
    resumed = None
    if RESUME in argv:
        place = argv.index(RESUME)
        argv, step = [*argv[:place], *argv[place + 2 :]], "".join(argv[place + 1 : place + 2])
        if not wiring.trains or not step.isdecimal():
            raise ConfigError(f"usage: python -m stages.{stage} {RESUME} STEP (training stages only); got {step!r}")
        resumed = int(step)
    items = [text for text in argv if "=" not in text]
    overrides = [text for text in argv if "=" in text]
    if wiring.items:
        if len(items) != 1 or not (items[0] in wiring.items or (wiring.items == ANY and items[0].isidentifier())):
            raise ConfigError(f"usage: python -m stages.{stage} {_item_choices(wiring)} [key=value ...]; got {items}")
        return items[0], overrides, resumed
    if items:
        raise ConfigError(f"usage: python -m stages.{stage} [key=value ...]; got {items[0]!r}")
    for text in overrides:
        parse_override(text)
    return None, overrides, resumed


def _item_choices(wiring: Wiring) -> str:
    if wiring.items == ANY:
        return "MODEL"
    return f"{{{'|'.join(wiring.items)}}}"


def _check_inputs(inputs: dict[str, Path], optional: tuple[str, ...]) -> None:
    for name, path in inputs.items():
        if name not in optional and not path.exists():
            raise InputError(f"{path} does not exist; {remedy(path)}")


def remedy(path: Path) -> str:
    """What to do about a missing input: usually the `dvc repro` command that makes it."""
    if stage := graph.maker(Path(), PurePosixPath(path)):
        return f"make it with: dvc repro {stage}"
    if path.parts[0] == "models" and path.name != "scratch":  # models/scratch is in git
        return f"models/ contains: {', '.join(sorted(p.name for p in path.parent.glob('*'))) or 'nothing'}"
    if path.parts[0] == "metrics":
        return "make it with: dvc repro"
    return "it is part of the repository: restore it with git checkout"


def _lineage(stage: str, item: str | None, seed: int, resolved: JsonObject, inputs: dict[str, Path]) -> JsonObject:
    """What the run is computed from: its key, its code hash, and the digest of each input."""
    code = {module: hash_ for module, (hash_, _) in codehash.closures(Path(), [stage])[stage].items()}
    digests = {name: workdir.digest(path) if path.exists() else "absent" for name, path in inputs.items()}
    key = workdir.make_key(stage=stage, item=item, seed=seed, parameters=resolved, inputs=digests, code=code)
    return {
        "key": key,
        "code": workdir.canonical_hash(code),
        "inputs": {_lineage_path(inputs[k]): v for k, v in digests.items()},
        "versions": workdir.versions(),
    }


def _lineage_path(path: Path) -> str:
    """An input's path in the lineage; outside the repository, only its name, since its location has no effect."""
    return path.name if path.is_absolute() else str(path)


def _make_job(
    stage: str, item: str | None, seed: int, written: JsonObject, runtime: Runtime, folder: Path, lineage: JsonObject
) -> workdir.Job:
    """The job of an unfinished key. The caller must hold the key's lock: this opens the job's MLflow run. `written`:
    the parameters as in params.yaml.
    """
    tags = {
        "stage": stage,
        "work.key": lineage["key"],
        "dvc.exp": os.environ.get("DVC_EXP_NAME", ""),
        "dvc.baseline": os.environ.get("DVC_EXP_BASELINE_REV", ""),
        "git.commit": git_commit(),
    }
    if stage not in WITHOUT_TORCH:
        tags |= device.describe(runtime.precision)
    name = f"{stage}@{item}" if item else stage
    tracker = tracking.Tracker(
        name,
        folder,
        tags,
        written,
        quiet=runtime.find_lr,
        inputs=lineage["inputs"],
        others=runtime.trackers,
        live=LOGS / f"{name}.jsonl",
    )
    return workdir.Job(
        stage=stage,
        item=item,
        key=lineage["key"],
        seed=seed,
        folder=folder,
        workers=device.workers(runtime.workers),
        runtime=runtime,
        tracker=tracker,
        lineage=lineage,
        stop=workdir.StopRequest(),
    )


def git_commit() -> str:
    """HEAD's hash, read from .git without starting a process; empty outside a repository."""
    root = Path(os.environ.get("DVC_ROOT", "."))
    head = root / ".git" / "HEAD"
    try:
        text = head.read_text().strip()
        if not text.startswith("ref: "):
            return text
        reference = root / ".git" / text[5:]
        if reference.is_file():
            return reference.read_text().strip()
        packed = (root / ".git" / "packed-refs").read_text().splitlines()
        return next((line.split(" ")[0] for line in packed if line.endswith(f" {text[5:]}")), "")
    except OSError:
        return ""


def summary(job: workdir.Job, seconds: float) -> str:
    """The closing lines of a stage: its time and the first of its final numbers, in columns."""
    flat = tracking.flatten(tracking.clean(job.tracker.final))

    def text(key: str) -> str:
        parts = [flat[key], *(flat.get(f"{key}{end}") for end in ("_low", "_high"))]
        value, *ends = [f"{part:,.4g}" if isinstance(part, float) else str(part) for part in parts if part is not None]
        return value if len(ends) < 2 or "not finite" in ends else f"{value} ({' to '.join(ends)})"

    shown = [(key, text(key)) for key in flat if not key.endswith(("_low", "_high"))][:12]
    shown = [(key, value) for key, value in shown if len(value) <= WIDEST]
    widths = [max((len(entry[part]) for entry in shown), default=0) for part in (0, 1)]
    cells = [f"{key:{widths[0]}}  {value:>{widths[1]}}" for key, value in shown]
    each = max(1, 100 // (sum(widths) + 6))
    rows = ["  " + "    ".join(cells[first : first + each]) for first in range(0, len(cells), each)]
    return "\n".join([f"{job.name}: done in {tracking.duration(seconds)} (key {job.key})", *rows])


def help_text(module: ModuleType, stage: str, wiring: Wiring) -> str:
    """The text of `--help`: the module's docstring, usage, every key."""
    settings = Settings(Path(), [])
    item = f" {_item_choices(wiring)}" if wiring.items else ""
    resume = f" [{RESUME} STEP]" if wiring.trains else ""
    usage = f"usage: python -m stages.{stage}{item}{resume} [key=value ...]"
    lines = [inspect.cleandoc(module.__doc__ or ""), "", usage, ""]
    lines += ["inputs:", *(f"  {path}" for path in wiring.inputs.values())]
    lines += [
        "outs:",
        *(f"  {path}" for path in wiring.outs.values()),
        "keys:",
        *explain(module.Params, settings, stage),
    ]
    lines += ["runtime (does not affect results):", *explain(Runtime, settings, "runtime")]
    return "\n".join(lines) + "\n"


def meanings(kind: type) -> dict[str, str]:
    """The docstring under each field of a dataclass and of its bases."""
    texts: dict[str, str] = {}
    for base in reversed([base for base in kind.__mro__ if "__dataclass_fields__" in vars(base)]):
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(node, ast.ClassDef)
        for field, below in itertools.pairwise(node.body):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    texts[name] = " ".join(text.split())
    return texts


def explain(kind: type[DataclassInstance], settings: Settings, name: str) -> list[str]:
    """A line for each key of a block: key, current value, type, origin, meaning."""
    values = settings.layers(name)
    hints, texts = typing.get_type_hints(kind), meanings(kind)  # once: both parse source code
    lines = []
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        source = field.metadata.get("from")
        if source is not None:
            lines.append(f"  {field.name:24} from {source}")
        elif is_flat(hint):
            lines += explain(hint, settings, name)
        else:
            default = "" if field.default is dataclasses.MISSING else field.default
            value = values.get(field.name, Value(default, "default"))
            head = f"  {name}.{field.name} = {value.raw}"
            lines.append(f"{head:44} {type_name(hint)}, {value.origin}: {texts.get(field.name, '')}".rstrip(": "))
    return lines
