"""Configuration: precedence, strictness, messages; params.yaml as DVC and Hydra both read it."""

import dataclasses
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from dvc.utils import serialize
from dvc.utils.hydra import apply_overrides
from omegaconf import OmegaConf
from ruamel.yaml import YAML

from pipeline.ingest.sources import DataConfig
from pipeline.run.config import (
    Runtime,
    Settings,
    Value,
    as_written,
    block,
    build,
    group,
    parse_override,
    stage_names,
    stage_params,
)
from pipeline.run.errors import ConfigError
from pipeline.run.stage import meanings

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class Inner:
    rate: float
    """How fast."""
    steps: int | None = None
    """How long."""


@dataclass(frozen=True, kw_only=True)
class Params:
    kl: float = 0.1  # pull
    name: str = "a"
    width: int = group("model.width")
    fit: Inner


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name in ("model/nano", "model/tiny", "scale/demo", "data/machine"):
        (tmp_path / "conf" / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "conf/model/nano.yaml").write_text("width: 8\n")
    (tmp_path / "conf/model/tiny.yaml").write_text("width: 16\n")
    (tmp_path / "conf/scale/demo.yaml").write_text("# @package _global_\nrlhf: {kl: 0.2, rate: 0.5, steps: 7}\n")
    (tmp_path / "conf/data/machine.yaml").write_text("source: machine\n")
    shutil.copy(ROOT / "conf/config.yaml", tmp_path / "conf/config.yaml")
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages/rlhf.py").write_text("")
    write(tmp_path, "rlhf: {kl: null, rate: 1e-3}")
    return tmp_path


def write(root: Path, text: str) -> None:
    (root / "params.yaml").write_text(f"seed: 1\ndata_seed: 1\nmodel: nano\nscale: demo\ndata: machine\n{text}\n")


def resolved(root: Path, *overrides: str) -> Params:
    settings = Settings(root, list(overrides))
    return build(Params, settings.layers("rlhf"), "rlhf", settings)


def test_command_line_beats_params_beats_scale_beats_default(repository: Path) -> None:
    found = resolved(repository, "rlhf.steps=3")
    assert (found.fit.steps, found.fit.rate, found.kl, found.name) == (3, 1e-3, 0.2, "a")
    assert resolved(repository, "rlhf.kl=1").kl == 1.0


def test_none_takes_away_what_the_scale_file_says_where_it_may_be_absent(repository: Path) -> None:
    assert resolved(repository).fit.steps == 7
    assert resolved(repository, "rlhf.steps=none").fit.steps is None
    write(repository, "rlhf: {rate: 1e-3, steps: none}")
    assert resolved(repository).fit.steps is None
    with pytest.raises(ConfigError, match=r"rlhf\.rate: expected float, got \"none\""):
        resolved(repository, "rlhf.rate=none")
    grpo = stage_params("grpo", Settings(ROOT, ["scale=demo", "grpo.adapter=none"]))
    assert grpo.adapter is None and stage_params("grpo", Settings(ROOT, ["scale=demo"])).adapter is not None


def test_preset_lies_between_params_and_scale(repository: Path) -> None:
    (repository / "conf/preset/rlhf").mkdir(parents=True)
    (repository / "conf/preset/rlhf/paper.yaml").write_text("kl: 0.7\nrate: 9.0\n")
    write(repository, "rlhf: {preset: paper, kl: null, rate: 1e-3}")
    assert (resolved(repository).kl, resolved(repository).fit.rate) == (0.7, 1e-3)
    with pytest.raises(ConfigError, match=r"rlhf\.preset.*options: paper"):
        resolved(repository, "rlhf.preset=papr")


def test_a_key_of_the_selected_model_file_arrives(repository: Path) -> None:
    assert resolved(repository).width == 8
    assert resolved(repository, "model=tiny").width == 16
    assert resolved(repository, "model.width=5").width == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "rlhf: {kll: 1}",
            r"params\.yaml: rlhf: unknown key 'kll' \(did you mean 'kl'\?\); valid keys: kl, name, rate, steps",
        ),
        ("rlhf: {kl: high}", r'params\.yaml: rlhf\.kl: expected float, got "high"'),
        ("rlhf: {steps: 1.5}", r"params\.yaml: rlhf\.steps: expected int or none"),
        ("rlhf: {name: 3}", r"rlhf\.name: expected str"),
        ("rlhf: 3", r"rlhf: expected a block of keys"),
        ("rlhg: {kl: 1}", r"unknown key 'rlhg' \(did you mean 'rlhf'\?\)"),
        ("rlhf: {kl: 1", r"params\.yaml: not valid YAML"),
        ("rlhf: {name: '${seed}'}", r"not allowed here"),
    ],
)
def test_a_wrong_params_file_is_named_with_key_and_remedy(repository: Path, text: str, message: str) -> None:
    write(repository, text)
    with pytest.raises(ConfigError, match=message):
        resolved(repository)


def test_a_missing_key_names_its_type(repository: Path) -> None:
    (repository / "conf/scale/demo.yaml").write_text("# @package _global_\nrlhf: {kl: 1}\n")
    write(repository, "rlhf: {kl: 1}")
    with pytest.raises(ConfigError, match=r"rlhf\.rate: missing: expected float"):
        resolved(repository)


def test_an_unknown_option_lists_those_that_exist(repository: Path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'tiny'.*options: nano, tiny"):
        resolved(repository, "model=tinny")


def test_an_override_without_equals_sign_is_refused() -> None:
    with pytest.raises(ConfigError, match="key=value"):
        parse_override("language.steps")


def test_floats_accept_text_and_integers_but_ints_no_floats() -> None:
    assert build(Inner, {"rate": Value("1e-3", "x")}, "w").rate == 1e-3
    assert build(Inner, {"rate": Value(2, "x")}, "w").rate == 2.0
    with pytest.raises(ConfigError):
        build(Inner, {"rate": Value(True, "x")}, "w")


def test_post_init_errors_name_block_and_file() -> None:
    with pytest.raises(ConfigError, match=r"p\.yaml: runtime: precision: expected auto"):
        build(Runtime, {"precision": Value("fp8", "p.yaml")}, "runtime")


@dataclass(frozen=True, kw_only=True)
class Explained(type("Merged", (Inner,), {})):
    first: int = 1
    second: int = 2
    """Over
    two lines."""

    def method(self) -> int:
        """Documents no field."""
        return self.second


def test_the_docstring_under_a_field_is_its_meaning() -> None:
    assert meanings(Explained) == {"rate": "How fast.", "steps": "How long.", "second": "Over two lines."}


def test_block_fields_read_other_blocks() -> None:
    assert block("sandbox").metadata["from"] == "sandbox"


# -- the repository's own files ----------------------------------------------------------------------------------------


SCALES = ("smoke", "demo", "gpu", "cluster")
MODELS = sorted(path.stem for path in (ROOT / "conf/model").glob("*.yaml"))


@pytest.mark.parametrize(
    ("scale", "model"),
    [  # each scale and each model once in the fast group
        pytest.param(scale, model, marks=() if number % len(SCALES) == n else (pytest.mark.slow, pytest.mark.full))
        for number, model in enumerate(MODELS)
        for n, scale in enumerate(SCALES)
    ],
)
def test_parameters_of_every_stage_resolve_for_every_scale_and_model(
    in_repository: Path, scale: str, model: str
) -> None:
    settings = Settings(Path(), [f"scale={scale}", f"model={model}"])
    for stage in stage_names(Path()):
        assert dataclasses.is_dataclass(stage_params(stage, settings))


def test_dvc_and_hydra_read_the_same_trees(in_repository: Path) -> None:
    for path in [Path("params.yaml"), *sorted(Path("conf").rglob("*.yaml"))]:
        as_dvc = YAML(typ="safe", pure=True).load(path.read_text())
        as_hydra = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        assert as_dvc == as_hydra, path


@pytest.mark.parametrize("key", ["sandbox", "sampler"])
def test_dvc_sets_an_address_that_it_can_read(key: str, tmp_path: Path) -> None:
    """Set as by `dvc exp run -S`, which inside braces writes an address that libyaml refuses."""
    shutil.copy(ROOT / "params.yaml", tmp_path)
    apply_overrides(tmp_path / "params.yaml", [f"runtime.{key}.url=http://127.0.0.1:8100"])
    assert serialize.load_yaml(tmp_path / "params.yaml")["runtime"][key] == {"url": "http://127.0.0.1:8100"}


def test_params_yaml_has_no_interpolation_and_no_stray_block(in_repository: Path) -> None:
    Settings(Path(), [])
    assert "${" not in Path("params.yaml").read_text()


def test_what_each_stage_reads_is_what_dvc_tracks(in_repository: Path) -> None:
    graph = yaml.safe_load(Path("dvc.yaml").read_text())["stages"]
    for stage in stage_names(Path()):
        tracked = tracked_blocks(graph[f"stage_{stage}"].get("params", []))
        assert tracked == read_blocks(stage), stage


def tracked_blocks(params: list[object]) -> set[str]:
    names: set[str] = set()
    for entry in params:
        if isinstance(entry, str):
            names.add(entry)
        else:
            assert isinstance(entry, dict)
            for file, keys in entry.items():
                kind = file.split("/")[1] if file.startswith("conf/") else file
                names |= {f"{kind}:{key}" for key in keys} if keys else {f"{kind}:*"}
    return names


def read_blocks(stage: str) -> set[str]:
    import importlib

    module = importlib.import_module(f"stages.{stage}")
    text = Path(f"stages/{stage}.py").read_text()
    names = {"data_seed" if 'seed="data_seed"' in text else "seed"} if "job.seed" in text else set()
    for field in dataclasses.fields(module.Params):
        source = field.metadata.get("from")
        if source is None:
            names |= {stage, "scale", f"scale:{stage}"} if in_a_scale_file(stage) else {stage}
            names |= {"preset:*"} if Path("conf/preset", stage).is_dir() else set()
            continue
        if source.startswith("conf/"):  # one key of a specific file
            path, _, key = source.partition(":")
            names.add(f"{path.split('/')[1]}:{key}")
            continue
        which, _, key = source.partition(".")
        if which in stage_names(Path()):
            names |= {source}
        elif which in ("model", "data"):
            names |= {which, f"{which}:{key or '*'}"}
        else:
            names |= {which, "scale", f"scale:{which}"}
    return names


def in_a_scale_file(name: str) -> bool:
    """Whether a file in conf/scale/ has the block; a user's own stage may have all its values in params.yaml."""
    return any(name in yaml.safe_load(path.read_text()) for path in Path("conf/scale").glob("*.yaml"))


def test_where_training_begins_stands_in_params_yaml_alone(in_repository: Path) -> None:
    """`base` is a path in dvc.yaml, which would not follow a scale file or preset that set it."""
    blocks = yaml.safe_load(Path("params.yaml").read_text())
    for stage in stage_names(Path()):
        settings = Settings(Path(), [])
        if "base" in {field.name for field in dataclasses.fields(stage_params(stage, settings))} - {"tokenizer"}:
            assert stage == "tokenizer" or isinstance(blocks[stage]["base"], str), stage
    for path in [*Path("conf/scale").glob("*.yaml"), *Path("conf").glob("preset/*/*.yaml")]:
        content = yaml.safe_load(path.read_text())
        blocks = [content, *(block for name, block in content.items() if name != "seconds")]  # those of stage base
        assert not any("base" in block for block in blocks if isinstance(block, dict)), path


def test_the_tokenizer_takes_its_base_from_the_language_model(in_repository: Path) -> None:
    assert stage_params("tokenizer", Settings(Path(), [])).base == "scratch"
    assert stage_params("tokenizer", Settings(Path(), ["language.base=base", "language.steps=7"])).base == "base"


def test_the_names_of_the_packages_come_from_their_file_whatever_data_is_selected(in_repository: Path) -> None:
    names = yaml.safe_load(Path("conf/data/packages.yaml").read_text())["packages"]
    for data in ("files", "packages"):
        assert stage_params("corpus", Settings(Path(), [f"data={data}"])).package_names == names


def test_a_mapping_is_the_dataclass_that_knows_its_keys(repository: Path) -> None:
    def told(**entry: object) -> str:
        values = {"source": Value("files", "f.yaml"), "text": Value([entry], "f.yaml")}
        with pytest.raises(ConfigError) as caught:
            build(DataConfig, values, "data")
        return str(caught.value)

    assert "unknown key 'wieght' (did you mean 'weight'?); valid keys: columns, encoding, files," in told(
        files="a", wieght=1
    )
    assert "did you mean 'files'" in told(file="a")
    assert 'text[0].source: expected packages, got "pakages"' in told(source="pakages")
    assert "unknown key 'idd' (did you mean 'id'?); valid keys: config, data_dir, enabled" in told(
        source="hub", idd="a/b"
    )
    assert "unknown key 'id'; valid keys: source, weight" in told(source="packages", id="a/b")


def test_the_address_of_the_sandbox_service_is_a_nested_key_of_the_runtime_block(repository: Path) -> None:
    def runtime(*overrides: str) -> Runtime:
        settings = Settings(repository, list(overrides))
        return build(Runtime, settings.layers("runtime"), "runtime")

    assert runtime().sandbox_url is None
    write(repository, "rlhf: {}\nruntime: {sandbox: {url: null}}")
    assert runtime().sandbox_url is None
    assert runtime("runtime.sandbox.url=http://a:8801").sandbox_url == "http://a:8801"
    with pytest.raises(ConfigError, match=r"command line: runtime\.sandbox: unknown key 'urll'.*valid keys: url"):
        runtime("runtime.sandbox.urll=a")
    with pytest.raises(ConfigError, match=r"runtime\.sandbox\.url: expected str or none, got \"3\""):
        runtime("runtime.sandbox.url=3")


def test_resolved_parameters_are_told_by_the_keys_of_their_block() -> None:
    for stage in ("code", "lora", "language"):
        told = as_written(stage_params(stage, Settings(ROOT, ["scale=smoke"])))
        assert {"steps", "learning_rate"} <= set(told) and "fit" not in told, stage
        assert json.loads(json.dumps(told)), "it is written as JSON"
    told = as_written(
        stage_params("rlhf", Settings(ROOT, ["scale=smoke", "rlhf.beta=0.25", "rlhf.adapter={rank: 3, alpha: 6}"]))
    )
    assert (told["beta"], told["adapter"]["rank"]) == (0.25, 3)
    assert as_written(stage_params("language", Settings(ROOT, ["model=tiny"])))["model"]["width"] == 256


@pytest.mark.parametrize(
    "path", ["params.yaml", *(str(p.relative_to(ROOT)) for p in sorted(ROOT.glob("conf/data/*.yaml")))]
)
def test_the_values_have_the_form_in_which_dvc_writes_them(path: str, tmp_path: Path) -> None:
    """So `dvc exp run -S` changes only one line."""
    from dvc.utils.serialize import modify_yaml

    copy = tmp_path / "values.yaml"
    copy.write_bytes((ROOT / path).read_bytes())
    with modify_yaml(str(copy)):
        pass
    assert copy.read_text() == (ROOT / path).read_text()


def test_a_duplicate_key_in_a_file_of_conf_is_named_with_its_line(repository: Path) -> None:
    (repository / "conf/scale/demo.yaml").write_text("# @package _global_\nrlhf:\n  kl: 0.2\n  kl: 0.3\n")
    with pytest.raises(ConfigError, match=r"demo\.yaml: not valid YAML: found duplicate key 'kl' at line 3, column 3"):
        Settings(repository, [])
