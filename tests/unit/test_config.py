"""Every option composes; what cannot be is refused in one line that names the setting."""

import inspect
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import collectors.config
import learning.config
import learning.validation
import wsync
from collectors.env_config import EnvConfig, env_factory, sample, solved_at
from collectors.errors import ConfigError
from collectors.targets import instantiate_setting
from learning.options import TrainConfig
from learning.resuming import with_earlier_overrides
from wsync.registry import load_backend

CONF = Path(__file__).resolve().parents[2] / "conf"
GROUPS = ("weight_sync", "collector", "env", "policy", "algorithm", "logger", "chaos", "experiment")
OPTIONS = [(group, path.stem) for group in GROUPS for path in sorted((CONF / group).glob("*.yaml"))]
BACKENDS = sorted(wsync.registered_backends())
SCHEMES = {name: load_backend(name) for name in BACKENDS}
REQUIRED = {"url": "memory://test", "urls": "http://127.0.0.1:1"}


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    learning.config.register_configs()


def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("train", overrides=list(overrides))


def config(*overrides: str) -> TrainConfig:
    result = OmegaConf.to_object(composed(*overrides))
    assert isinstance(result, TrainConfig)
    return result


def check(config: TrainConfig) -> None:
    learning.validation.check(config, learning.config.settings())


def refusal(*overrides: str) -> str:
    """What train.py prints."""
    with pytest.raises((HydraException, OmegaConfBaseException, ConfigError)) as caught:
        chosen = config(*overrides)
        check(chosen)
        scheme = instantiate_setting("weight_sync", chosen.weight_sync)
        collectors.config.check(chosen.collector, scheme, chosen.num_workers)
        sample(chosen.env)
    answer = learning.config.describe_error(caught.value)
    assert answer is not None
    return answer


@pytest.mark.parametrize(("group", "option"), OPTIONS, ids="=".join)
def test_every_option_composes(group: str, option: str) -> None:
    carried = next(name for name, scheme in SCHEMES.items() if group != "collector" or option in scheme.collectors)
    more = {"collector": [f"weight_sync={carried}"]}.get(group, ["env.id=CartPole-v1"] if option == "gym" else [])
    chosen = config(*more, f"{group}={option}")
    check(chosen)
    collectors.config.check(chosen.collector, instantiate(chosen.weight_sync), chosen.num_workers)


@pytest.mark.parametrize("name", BACKENDS)
def test_every_registered_backend_is_an_option_with_the_arguments_of_its_scheme(name: str) -> None:
    parameters = inspect.signature(SCHEMES[name]).parameters.values()
    required = {one.name: REQUIRED[one.name] for one in parameters if one.default is inspect.Parameter.empty}
    given = [f"weight_sync.{key}={value}" for key, value in required.items()]
    chosen = config(f"weight_sync={name}", *given, "timeout=7")
    check(chosen)
    scheme = instantiate(chosen.weight_sync)
    assert type(scheme) is SCHEMES[name] and scheme.timeout == 7
    for option, bundled in collectors.config.BUNDLED.items():
        if option in SCHEMES[name].collectors or option == "single":
            collectors.config.check(bundled, scheme, 1)
        else:
            with pytest.raises(ConfigError, match=f"{option}.* cannot carry {type(scheme).__name__}"):
                collectors.config.check(bundled, scheme, 1)
    if SCHEMES[name].collectors:
        assert chosen.collector._target_ == collectors.config.BUNDLED[SCHEMES[name].collectors[0]]._target_


def test_train_py_chooses_in_its_own_file_when_a_send_is_finished() -> None:
    assert wsync.SharedMemWeightSyncScheme().acknowledge == "installed"
    assert instantiate(config("weight_sync=shared_mem").weight_sync).acknowledge == "published"


def test_settings_at_top_level_reach_the_groups() -> None:
    assert config("timeout=7").weight_sync.timeout == 7
    assert config("timeout=7", "weight_sync.timeout=5").weight_sync.timeout == 5
    assert config("weight_sync=multiprocess", "collector=single").num_workers == 1


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("num_worker=3", "num_workers"),
        ("+num_worker=3", "num_workers"),
        ("algorithm.lrr=3", "algorithm.lr"),
        ("weight_snyc=none", "weight_sync"),
        ("lr=0.1", "algorithm.lr"),
        ("weight_sync=sharedmem", "shared_mem"),
        ("env=pong", "atari/pong"),
        ("env.id=CartPol-v1", "CartPole"),
        ("weight_sync._target_=wsync.RayWeightSyncSchema", "RayWeightSyncScheme"),
    ],
)
def test_a_typo_is_answered_with_what_was_meant(override: str, meant: str) -> None:
    answer = refusal(override)
    assert override.lstrip("+").partition("=")[0] in answer and meant in answer and "\n" not in answer


@pytest.mark.parametrize(
    "overrides",
    [
        "num_workers=many",
        "num_workers=1.5",
        "weight_sync.timeout=soon",
        "policy.hidden=64",
        "num_workers=0",
        "num_envs=-1",
        "total_frames=0",
        "timeout=nan",
        "frames_per_batch=31",
        "frames_per_batch=15 collector=multi_async",
        "algorithm.gamma=1.1",
        "algorithm.epochs=0",
        "policy.hidden=[64,0]",
        "env.max_episode_steps=0",
        "seed=99999999999999999999",
        "threads=100000",
        "algorithm.max_grad_norm=-1",
        "algorithm.lr=inf",
        "algorithm.entropy_coef=nan",
        "collector.run_ahead=-1 collector=multi_async",
        "collector.max_staleness=-1",
        "collector.port=-1 weight_sync=distributed",
        "chaos.rate=nan chaos=kill",
        "collector.cat_results=1",
        "logger.mode=of-line",
        "sync_each=minibatch",
        "staleness=2 sync_each=epoch",
        "objective=frame",
        "weight_sync.strategy=foo",
        "weight_sync._target_=mine.Scheme",
        "collector=multi_sync weight_sync=ray",
        "+env.kwargs.gravitas=1",
        "+env.kwargs.num_envs=3",
    ],
)
def test_an_impossible_value_is_refused_in_one_line_that_names_the_setting(overrides: str) -> None:
    name = overrides.split()[0].lstrip("+").partition("=")[0].removeprefix("weight_sync._").split("kwargs.")[-1]
    answer = refusal(*overrides.split())
    assert name.removeprefix("weight_sync.") in answer and "\n" not in answer


def test_infinity_is_possible_where_it_is_a_limit_itself() -> None:
    check(config("timeout=inf", "algorithm.max_grad_norm=inf", "algorithm.lr_end_factor=0"))


@pytest.mark.parametrize(
    "options",
    [
        "collector=single num_workers=1",
        "collector=multi_async",
        *(f"weight_sync={name} collector={name}{kind}" for name in ("distributed", "rpc") for kind in ("", "_async")),
    ],
)
def test_how_stale_a_batch_may_be_is_a_setting_of_every_collector(options: str) -> None:
    asynchronous = ["collector.run_ahead=3"] if "async" in options else []
    chosen = config(*options.split(), "collector.max_staleness=3", *asynchronous)
    check(chosen)
    keywords = instantiate(chosen.collector, _partial_=True).keywords
    assert keywords["max_staleness"] == 3 and keywords.get("run_ahead") in (3, None)
    assert ("run_ahead" in keywords) >= bool(asynchronous)


def test_a_file_of_a_user_chooses_an_option_under_defaults(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nlogger: none\n")
    assert "experiment/mine" in refusal(f"hydra.searchpath=[file://{tmp_path}]", "experiment=mine")


def test_an_environment_that_cannot_be_used_is_refused_before_workers_are_started() -> None:
    for make, wrappers in (("gymnasium.make_vec", []), ("gymnasium.make", ["collectors.ActionMask"])):
        options = {"_target_": make, "id": "CartPole-v1", **({"num_envs": 2} if "vec" in make else {})}
        env = EnvConfig("mine", make=options, wrappers=[{"_target_": one} for one in wrappers])
        with pytest.raises(ConfigError, match="env"):
            sample(env, "mine")


def test_the_threshold_is_the_configs_else_that_of_the_id() -> None:
    assert solved_at(config().env) == 475
    assert solved_at(config("env=pendulum").env) == -200
    assert solved_at(config("env=pendulum", "env.id=MountainCar-v0").env) == -110
    assert solved_at(config("env.id=MountainCar-v0", "env.solved_at=30").env) == 30
    unversioned = config("env.id=CartPole").env
    assert solved_at(unversioned) == 475 and env_factory(unversioned, 2)().batch_size == (2,)


def test_arguments_from_yaml_are_plain_lists_and_dictionaries() -> None:
    given = {"a": [1, {"b": [2]}], "c": {"d": 3}, "shape": {"_target_": "builtins.tuple", "_args_": [[84, 84]]}}
    made: Any = instantiate_setting("env", OmegaConf.create({"_target_": "builtins.dict", **given}))
    assert [type(one) for one in (made["a"], made["a"][1], made["a"][1]["b"], made["c"])] == [list, dict, list, dict]
    assert made["shape"] == (84, 84)


def test_a_resume_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="resume"):
        with_earlier_overrides([f"resume={tmp_path}"])
    with pytest.raises(ConfigError, match="resume"):
        with_earlier_overrides(["-m", f"resume={tmp_path},{tmp_path / 'other'}"])
    assert with_earlier_overrides(["seed=1", "resume=null"]) == ["seed=1", "resume=null"]
