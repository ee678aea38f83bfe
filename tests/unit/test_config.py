"""Every option composes; what cannot be is refused in one line; the dataclasses say what the classes take."""

import inspect
from copy import deepcopy
from dataclasses import fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.types import RunMode
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

import collectors.config
import learning.config
import wsync
from collectors.config import EnvConfig, MultiSyncConfig, instantiate_setting, sample
from collectors.errors import ConfigError
from learning import CNN, MLP, PPO, RNN
from learning.config import describe_error
from learning.options import LIMITS, TrainConfig, repays_compiling
from learning.reporting.files import FolderError
from learning.reporting.wandb_logger import WandbLogger
from learning.resuming import SETTINGS, with_earlier_overrides
from wsync.config import config_of
from wsync.registry import load_backend

CONF = Path(__file__).resolve().parents[2] / "conf"
GROUPS = ("weight_sync", "collector", "env", "policy", "algorithm", "logger", "experiment")
OPTIONS = [(group, path.stem) for group in GROUPS for path in sorted((CONF / group).glob("*.yaml"))]
TARGETS = {name: scheme.replace(":", ".") for name, scheme in wsync.registered_backends().items()}
BACKENDS = sorted(TARGETS)
GIVEN = {"gym": ["env.id=CartPole-v1"], "store": ["weight_sync.url=/somewhere"]}
SCHEMES = {name: load_backend(name) for name in BACKENDS}


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    learning.config.register_configs()


def composed(*overrides: str, folder: Path | None = None) -> DictConfig:
    """The config, with a folder of a user's own if there is one."""
    if folder is not None:
        learning.config.register_configs([folder])
        overrides = (f"hydra.searchpath=[file://{folder}]", *overrides)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("train", overrides=list(overrides))


def config(*overrides: str) -> TrainConfig:
    result = OmegaConf.to_object(composed(*overrides))
    assert isinstance(result, TrainConfig)
    return result


def check(config: TrainConfig) -> None:
    learning.options.check(config, learning.config.settings())


def refusal(*overrides: str) -> str:
    with pytest.raises(HydraException) as caught:
        composed(*overrides)
    return str(describe_error(caught.value))


@pytest.mark.parametrize(("group", "option"), OPTIONS, ids="=".join)
def test_every_option_composes(group: str, option: str) -> None:
    carried = next(name for name, scheme in SCHEMES.items() if group != "collector" or option in scheme.collectors)
    more = {"collector": [f"weight_sync={carried}"]}.get(group, GIVEN.get(option, []))
    chosen = config(*more, f"{group}={option}")
    check(chosen)
    collectors.config.check(chosen.collector, instantiate(chosen.weight_sync), chosen.num_workers)


def required(name: str) -> dict[str, str]:
    """Values for the arguments of a scheme that have no default."""
    parameters = inspect.signature(SCHEMES[name]).parameters.values()
    values = {"url": "memory://test", "urls": "http://127.0.0.1:1"}
    return {one.name: values[one.name] for one in parameters if one.default is inspect.Parameter.empty}


def overrides(name: str) -> list[str]:
    return [f"weight_sync={name}", *(f"weight_sync.{key}={value}" for key, value in required(name).items())]


@pytest.mark.parametrize("name", BACKENDS)
def test_every_registered_backend_is_an_option_with_the_arguments_of_its_scheme(name: str) -> None:
    chosen = config(*overrides(name), "timeout=7")
    check(chosen)
    assert chosen.weight_sync.timeout == 7
    scheme = instantiate(chosen.weight_sync)
    assert type(scheme) is SCHEMES[name]
    given = {field.name for field in fields(chosen.weight_sync)} - {"_target_"}
    assert given <= set(inspect.signature(SCHEMES[name]).parameters)
    built, made = instantiate(config_of(TARGETS[name])(**required(name))), SCHEMES[name](**required(name))
    for option in inspect.signature(SCHEMES[name]).parameters:
        of_both = [getattr(scheme, option, None) for scheme in (built, made)]
        assert str(of_both[0]) == str(of_both[1]), option  # strategies are objects


def test_57_3_who_acts_decides_in_one_place_when_a_send_is_finished() -> None:
    configs = [config_of(TARGETS["shared_mem"])(), config("weight_sync=shared_mem").weight_sync]
    for make in (wsync.SharedMemWeightSyncScheme, *(partial(instantiate, one) for one in configs)):
        acting = SimpleNamespace(remote_workers=[SimpleNamespace(worker_idx=0, sentinel=-1)])
        scheme = make()
        for context, finished in ((acting, "published"), (None, "installed")):  # anew when it is used again
            with scheme:
                scheme.init_on_sender("policy", context, num_workers=1)
                assert scheme.acknowledges is (finished == "installed")


@pytest.mark.parametrize("name", BACKENDS)
def test_the_scheme_names_the_collectors_that_can_carry_it(name: str) -> None:
    scheme, can = SCHEMES[name](**required(name)), SCHEMES[name].collectors
    for option, bundled in collectors.config.BUNDLED.items():
        if option in can or option == "single":
            collectors.config.check(bundled, scheme, 1)
        else:
            with pytest.raises(ConfigError, match=f"^collector={option} cannot carry {type(scheme).__name__}: "):
                collectors.config.check(bundled, scheme, 1)
    if can:
        chosen = config(*overrides(name)).collector
        assert chosen == collectors.config.BUNDLED[can[0]]


@pytest.mark.parametrize(
    ("option", "target", "common"),
    [
        ("algorithm/base_ppo", PPO, {}),
        ("logger/base_wandb", WandbLogger, {}),
        ("policy/base_mlp", MLP, {"initial_std": 1.0, "shared": False}),
        ("policy/base_cnn", CNN, {"initial_std": 1.0, "shared": True}),
        ("policy/base_rnn", RNN, {"initial_std": 1.0, "shared": True}),
    ],
)
def test_a_config_has_the_arguments_of_its_class(option: str, target: Any, common: dict[str, Any]) -> None:
    """Those that have a default, which is that of the class."""
    node = OmegaConf.to_container(ConfigStore.instance().load(f"{option}.yaml").node)
    arguments = {
        name: p.default for name, p in inspect.signature(target).parameters.items() if p.default is not p.empty
    }
    listed = {name: list(default) if isinstance(default, tuple) else default for name, default in arguments.items()}
    assert get_object(node.pop("_target_")) is target and node == listed | common


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("num_worker=3", "no setting is called 'num_worker'; did you mean 'num_workers'?"),
        ("algorithm.lrr=3", "no setting is called 'algorithm.lrr'; did you mean 'algorithm.lr'?"),
        ("weight_snyc=none", "did you mean 'weight_sync'?"),
        ("collector.num_envs=2", "did you mean 'num_envs'?"),
        ("lr=0.1", "did you mean 'algorithm.lr'?"),
        ("weight_sync.host=node", "'weight_sync.host' is a setting of another option of weight_sync"),
        ("collector.convert=2", "no setting is called 'collector.convert'"),
        ("num_workers=many", "num_workers=many: Value 'many' of type 'str' could not be converted to Integer"),
        ("policy.hidden=64", "policy.hidden=64: "),
        ("env=pong", "env=pong: there is no such option; did you mean 'atari/pong'?; there are: acrobot, "),
        ("env.kwargs.gravity=3", "is not in struct; say +env.kwargs.gravity=… to add it"),
        (
            "env.kwargs.vectorisation_mode=sync",
            "; did you mean 'vectorization_mode'?; say +env.kwargs.vectorisation_mode",
        ),
        ("seed=[", "this override cannot be read: "),
    ],
)
def test_a_slip_is_answered_in_one_line(override: str, said: str) -> None:
    answer = refusal(override)
    assert said in answer
    assert "\n" not in answer and "_convert_" not in answer


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "weight_sync.strategy=foo",
            "weight_sync: SharedMemWeightSyncScheme: strategy is 'tensordict' or 'state_dict', not 'foo'",
        ),
        (
            "weight_sync._target_=wsync.RayWeightSyncSchema",
            "weight_sync._target_=wsync.RayWeightSyncSchema: module 'wsync' has no 'RayWeightSyncSchema'; "
            "did you mean 'RayWeightSyncScheme'?",
        ),
    ],
)
def test_what_a_class_says_of_its_settings_is_said_once(override: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        instantiate_setting("weight_sync", config(override).weight_sync)
    assert str(caught.value) == said


def test_what_cannot_be_made_is_named_by_its_setting() -> None:
    with pytest.raises(ConfigError, match=r"^callbacks\[1\]: Reporter\(\) takes no arguments$"):
        instantiate_setting("callbacks[1]", {"_target_": "learning.reporting.Reporter", "path": 3})
    with pytest.raises(ConfigError, match=r"^algorithm\.part\._target_=learning\.PPOO: .*did you mean .PPO.\?$"):
        instantiate_setting("algorithm", {"_target_": "learning.PPO", "part": {"_target_": "learning.PPOO"}})
    with pytest.raises(ConfigError, match=r"^env\.wrappers\[0\]\._target_=collectors\.ActionMsk: .*'ActionMask'"):
        sample(EnvConfig("CartPole-v1", wrappers=[{"_target_": "collectors.ActionMsk"}]))
    advice = r": name its folder by --config-dir, or add it to PYTHONPATH$"
    with pytest.raises(
        ConfigError, match=r"^env\._target_=mine\.make: there is no module 'mine' on sys\.path" + advice
    ):
        sample(EnvConfig("mine.make", make={"_target_": "mine.make"}))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("+num_worker=3", "no setting is called 'num_worker'; did you mean 'num_workers'?"),
        ("+env.kwarg={x: 3}", "no setting is called 'env.kwarg'; did you mean 'env.kwargs'?"),
        ("num_workers=0", "it has to be greater than 0"),
        ("timeout=nan", "it has to be greater than 0"),
        ("policy.hidden=[64,0]", "it has to be greater than 0"),
        ("seed=99999999999999999999", "it has to be less than "),
        ("threads=100000", "it has to be less than or equal to 1024"),
        ("algorithm.gamma=1.1", "it has to be less than or equal to 1"),
        ("env.solved_at=nan", "it has to be a finite number"),
        ("weight_sync=distributed collector.port=-1", "it has to be greater than or equal to 0"),
        ("weight_sync=distributed weight_sync.host=", "at least 1 character"),
        ("policy.activation=cubic", "it has to be 'tanh', "),
        ("sync_each=minibatch", "it has to be 'update' or 'epoch'"),
        ("sync_each=epoch staleness=2", "counts updates: it cannot be combined with sync_each=epoch"),
        ("frames_per_batch=31", "at least one frame of each of 32 environments"),
        ("collector=multi_async frames_per_batch=15", "at least one frame of each of 16 environments"),
        ("collector.cat_results=1", "stack, or 0"),
        ("num_envs=1 collector.cat_results=0", "stack, or 0"),
        ("objective=frame", "the summary has no 'frame' there; entries: status, "),
        ("objective=weight_sync.p50", "no 'p50' there; entries: "),
        ("objective=verdict", "the entry of the summary is not a number, but "),
    ],
)
def test_an_impossible_value_is_refused_by_the_name_of_its_setting(override: str, said: str) -> None:
    given = override.split(" ") if "{" not in override else [override]
    with pytest.raises(ConfigError) as caught:
        check(config(*given))
    assert said in str(caught.value)
    assert given[-1].lstrip("+").partition("=")[0] in str(caught.value) or "staleness" in str(caught.value)


def test_the_numbers_that_have_a_limit_are_settings_and_infinity_is_possible_where_it_is_a_limit_itself() -> None:
    assert {name for name in LIMITS if name not in learning.config.settings()} == set()
    check(config("timeout=inf", "algorithm.max_grad_norm=inf", "algorithm.lr_end_factor=0"))


def test_a_gradient_step_is_compiled_where_the_planned_steps_repay_it() -> None:
    half_cheetah = ("env=mujoco/half_cheetah", "total_frames=100_000")
    repays = {half_cheetah: True, (*half_cheetah, "device=cuda"): False, ("env=atari/breakout",): True, (): False}
    assert {overrides: repays_compiling(config(*overrides)) for overrides in repays} == repays


def test_an_impossible_pair_is_refused() -> None:
    single, multi_sync = collectors.config.BUNDLED["single"], collectors.config.BUNDLED["multi_sync"]
    ray = wsync.RayWeightSyncScheme()
    with pytest.raises(ConfigError, match="num_workers is 1 there, not 2"):
        collectors.config.check(single, wsync.NoWeightSyncScheme(), 2)
    with pytest.raises(ConfigError, match="no scheme: name a subclass of WeightSyncScheme"):
        collectors.config.check(multi_sync, {}, 2)
    collectors.config.check(single, ray, 1)
    collectors.config.check(MultiSyncConfig(_target_="mine.Collector"), ray, 2)  # of another package
    collectors.config.check({"_target_": "mine.Collector"}, ray, 2)


def test_an_environment_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"env\.id=CartPol-v1: .*env\.id=module:id"):
        sample(EnvConfig("CartPol-v1"))
    for package, name in {"mujoco": "HalfCheetah-v5", "atari": "ALE/Pong-v5"}.items():
        if find_spec(package.replace("atari", "ale_py")) is None:
            with pytest.raises(ConfigError, match=rf"`pip install -e '\.\[{package}\]'`$"):
                sample(EnvConfig(name))
    with pytest.raises(ConfigError, match="gravitas"):
        sample(EnvConfig("CartPole-v1", kwargs={"gravitas": 1}))
    with pytest.raises(ConfigError, match=r"env\.wrappers\[0\] has no _target_: name the class of the wrapper"):
        sample(config("env.wrappers=[{target: gymnasium.wrappers.TimeLimit}]").env)


def test_each_run_of_a_sweep_has_an_id_of_its_own_and_the_group_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    run: Any = SimpleNamespace(mode=RunMode.MULTIRUN, sweep=SimpleNamespace(dir="day/time"))
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    for number, group in enumerate(["day-time", None]):
        run.job = SimpleNamespace(num=number)
        logger = learning.config.resolved(composed(), run).logger
        assert (logger.id, logger.group) == (f"mine-{number}", group)
        monkeypatch.setenv("WANDB_RUN_GROUP", "ours")


@pytest.mark.parametrize("wrapper", ["NormalizeObservation", "NormalizeReward"])
def test_a_wrapper_with_statistics_of_its_own_is_refused_with_what_to_use(wrapper: str) -> None:
    wrappers = [{"_target_": f"gymnasium.wrappers.{wrapper}"}, {"_target_": "gymnasium.wrappers.ClipAction"}]
    with pytest.raises(ConfigError, match=rf"{wrapper} has statistics .*env\.normalize_observations=true"):
        sample(EnvConfig("Pendulum-v1", wrappers=wrappers))


def resumed(folder: Path, earlier: list[str], *argv: str, config_folder: str | None = None) -> TrainConfig:
    """The config of a run that resumes one which was started with the overrides `earlier`."""
    (folder / SETTINGS).parent.mkdir(exist_ok=True)
    stored = {"overrides": earlier, "config_folders": [config_folder] if config_folder else []}
    OmegaConf.save(OmegaConf.create(stored), folder / SETTINGS)
    return config(*with_earlier_overrides([f"resume={folder}", *argv]))


def test_a_resumed_run_has_the_earlier_overrides_and_its_own_win(tmp_path: Path) -> None:
    earlier = ["weight_sync=multiprocess", "seed=5", "algorithm.lr=0.5", "timeout=9"]
    same = resumed(tmp_path, earlier)
    assert (same.seed, same.algorithm.lr, same.weight_sync.timeout, same.resume) == (5, 0.5, 9, str(tmp_path))
    other = resumed(tmp_path, earlier, "weight_sync=shared_mem", "algorithm.lr=0.1", "timeout=4")
    assert (other.seed, other.algorithm.lr, other.weight_sync.timeout) == (5, 0.1, 4)
    assert type(instantiate(other.weight_sync)) is wsync.SharedMemWeightSyncScheme


def test_a_group_that_is_chosen_anew_has_none_of_its_earlier_settings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ray = ["weight_sync=ray", "weight_sync.shared_memory=false", "collector.max_staleness=3", "seed=5"]
    shared = resumed(tmp_path, ray, "weight_sync=multiprocess")
    assert (shared.collector._target_, shared.seed) == ("collectors.MultiSyncCollector", 5)
    [warning] = caplog.messages
    assert warning.endswith(": weight_sync.shared_memory=false collector.max_staleness=3")
    again = resumed(tmp_path, ray, "weight_sync=ray", "seed=6")
    assert (again.weight_sync.shared_memory, again.collector.max_staleness, again.seed) == (False, 3, 6)
    assert resumed(tmp_path, ["algorithm.lr=0.01"], "env=acrobot").algorithm.lr == 1e-3
    assert resumed(tmp_path, ["env.id=MountainCar-v0"], "env=pendulum").env.id == "Pendulum-v1"


def test_resuming_a_run_with_a_config_folder_without_the_folder_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"made with a config folder; add it: --config-dir /home/me/my$"):
        resumed(tmp_path, [], config_folder="/home/me/my")
    assert with_earlier_overrides(["-cd", f"{tmp_path}", f"resume={tmp_path}"])[:2] == ["-cd", f"{tmp_path}"]
    (tmp_path / SETTINGS).write_text("overrides: [")
    with pytest.raises(FolderError, match=r"resume\.yaml is damaged: "):
        with_earlier_overrides([f"resume={tmp_path}"])


def test_resuming_from_a_folder_without_a_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run is stored there"):
        with_earlier_overrides([f"resume={tmp_path}"])
    with pytest.raises(ConfigError, match="not swept over"):
        with_earlier_overrides(["-m", f"resume={tmp_path},{tmp_path / 'other'}"])
    assert with_earlier_overrides(["seed=1", "resume=null"]) == ["seed=1", "resume=null"]


def test_57_21_every_backend_of_train_py_has_a_file_and_a_config_that_can_be_imported() -> None:
    from wsync.config import SharedMemWeightSyncSchemeConfig

    assert OmegaConf.to_object(OmegaConf.structured(SharedMemWeightSyncSchemeConfig(timeout=5.0))).timeout == 5.0
    shown = {path.stem for path in (CONF / "weight_sync").glob("*.yaml")}
    assert shown == {name for name, scheme in SCHEMES.items() if scheme.collectors}
    assert sorted(dir(wsync)) == sorted(wsync.__all__)


# --- a backend or a network of a user's own ---


FILES = {
    "mine": "_target_: file_backend.FileScheme\nfolder: x\n",
    "open": "_target_: file_backend.open_scheme\nfolder: x\n",
    "passing": "_target_: file_backend.PassingScheme\nfolder: x\n",
    "incomplete": "_target_: file_backend.FileScheme\n",
    "slip": "_target_: file_backend.FileScheme\nfolder: x\ntimout: 3\n",
    "absent": "_target_: no_such_module.FileScheme\n",
    "empty": "folder: x\n",
    "shared": "defaults:\n  - shared_mem\n  - _self_\nsync: false\n",
    "based": "defaults:\n  - base_distributed\n  - _self_\nsync: false\n",
    "unreadable": "folder: [\n",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config folder of a user; the module of the backend can be imported, and the store is as before afterwards."""
    monkeypatch.syspath_prepend(CONF.parent / "tests")
    (tmp_path / "weight_sync").mkdir()
    for name, content in FILES.items():
        (tmp_path / "weight_sync" / f"{name}.yaml").write_text(content)
    Plugins.instance()  # Hydra's own plugins are stored once per process: before the copy
    monkeypatch.setattr(ConfigStore.instance(), "repo", deepcopy(ConfigStore.instance().repo))
    return tmp_path


def test_a_yaml_file_has_the_options_of_its_scheme_and_the_collector_that_it_names_first(folder: Path) -> None:
    cfg = composed("weight_sync=mine", "timeout=7", folder=folder)
    assert dict(cfg.weight_sync) == {"_target_": "file_backend.FileScheme", "folder": "x", "timeout": 7}
    assert cfg.collector._target_ == "collectors.MultiAsyncCollector"
    assert composed("weight_sync=mine", "collector=multi_sync", "collector.cat_results=0", folder=folder)
    assert instantiate(composed("weight_sync=mine", "weight_sync.timeout=5", folder=folder).weight_sync).timeout == 5


def test_options_that_a_scheme_passes_on_are_those_of_its_base_class(folder: Path) -> None:
    cfg = composed("weight_sync=passing", "timeout=7", "weight_sync.depth=2", folder=folder).weight_sync
    assert dict(cfg) == {"_target_": "file_backend.PassingScheme", "folder": "x", "depth": 2, "timeout": 7}
    assert instantiate(cfg).timeout == 7  # a function that accepts any option may be given any
    assert instantiate(composed("weight_sync=open", "+weight_sync.timeout=5", folder=folder).weight_sync).timeout == 5


def test_a_yaml_file_may_build_on_a_registered_backend(folder: Path) -> None:
    shared = composed("weight_sync=shared", "timeout=7", folder=folder).weight_sync
    assert (shared.acknowledge, shared.sync, shared.timeout) == (None, False, 7)
    based = composed("weight_sync=based", folder=folder)
    assert type(instantiate(based.weight_sync)) is wsync.DistributedWeightSyncScheme
    assert based.collector._target_ == "collectors.distributed.DistributedCollector"


def test_a_registered_backend_needs_no_yaml_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wsync.registry._BACKENDS", {**wsync.registered_backends()})
    wsync.register_backend("registered", "file_backend:FileScheme")
    wsync.register_backend("nowhere", "no_such_module:Scheme")  # in the way of none but itself
    cfg = composed("weight_sync=registered", "weight_sync.folder=y", "timeout=7", folder=folder)
    assert dict(cfg.weight_sync) == {"_target_": "file_backend.FileScheme", "folder": "y", "timeout": 7}
    assert cfg.collector._target_ == "collectors.MultiAsyncCollector"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("weight_sync=mine weight_sync.timout=3", "no setting is called 'weight_sync.timout'; did you mean "),
        ("weight_sync=mine weight_sync.timeout=soon", "weight_sync.timeout=soon: Value 'soon'"),
        ("weight_sync=mine collector=ray", "collector=ray cannot carry FileScheme: choose collector=multi_async, "),
        ("weight_sync=slip", "Key 'timout' not in 'FileSchemeConfig'"),
        ("weight_sync=incomplete", "weight_sync.folder has no default: add weight_sync.folder=…"),
        ("weight_sync=absent", "weight_sync._target_=no_such_module.FileScheme: there is no module 'no_such_module'"),
        ("weight_sync=empty", "weight_sync is no scheme: name a subclass of WeightSyncScheme"),
        ("weight_sync=unreadable", "unreadable.yaml"),
        ("weight_sync=mnie", "weight_sync=mnie: there is no such option; did you mean 'mine'?; there are: absent, "),
    ],
)
def test_an_error_is_one_line(folder: Path, overrides: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "--config-dir", str(folder), *overrides.split()])
    with pytest.raises((HydraException, OmegaConfBaseException, YAMLError, ConfigError)) as caught:
        cfg = composed(*overrides.split(), folder=folder)
        config = OmegaConf.to_object(cfg)
        assert isinstance(config, learning.config.TrainConfig)
        scheme = instantiate_setting("weight_sync", config.weight_sync)
        collectors.config.check(config.collector, scheme, config.num_workers)
    message = learning.config.describe_error(caught.value)
    assert message is not None and said in message and "\n" not in message
