"""The config of a backend or a network of a user's own: its options, its collector, and errors in it."""

from copy import deepcopy
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

import collectors.config
import learning.config
import wsync
from collectors.config import instantiate_setting
from collectors.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
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
    monkeypatch.syspath_prepend(ROOT / "tests")
    (tmp_path / "weight_sync").mkdir()
    for name, content in FILES.items():
        (tmp_path / "weight_sync" / f"{name}.yaml").write_text(content)
    Plugins.instance()  # Hydra's own plugins are stored once per process: before the copy
    monkeypatch.setattr(ConfigStore.instance(), "repo", deepcopy(ConfigStore.instance().repo))
    return tmp_path


def composed(folder: Path, *overrides: str) -> DictConfig:
    learning.config.register_configs([folder])
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose("train", overrides=[f"hydra.searchpath=[file://{folder}]", *overrides])


def test_a_yaml_file_has_the_options_of_its_scheme_and_the_collector_that_it_names_first(folder: Path) -> None:
    cfg = composed(folder, "weight_sync=mine", "timeout=7")
    assert dict(cfg.weight_sync) == {"_target_": "file_backend.FileScheme", "folder": "x", "timeout": 7}
    assert cfg.collector._target_ == "collectors.MultiAsyncCollector"
    assert composed(folder, "weight_sync=mine", "collector=multi_sync", "collector.cat_results=0")
    assert instantiate(composed(folder, "weight_sync=mine", "weight_sync.timeout=5").weight_sync).timeout == 5


def test_options_that_a_scheme_passes_on_are_those_of_its_base_class(folder: Path) -> None:
    cfg = composed(folder, "weight_sync=passing", "timeout=7", "weight_sync.depth=2").weight_sync
    assert dict(cfg) == {"_target_": "file_backend.PassingScheme", "folder": "x", "depth": 2, "timeout": 7}
    assert instantiate(cfg).timeout == 7


def test_a_function_that_accepts_any_option_may_be_given_any(folder: Path) -> None:
    assert instantiate(composed(folder, "weight_sync=open", "+weight_sync.timeout=5").weight_sync).timeout == 5


def test_a_yaml_file_may_build_on_a_registered_backend(folder: Path) -> None:
    shared = composed(folder, "weight_sync=shared", "timeout=7").weight_sync
    assert (shared.acknowledge, shared.sync, shared.timeout) == (None, False, 7)
    based = composed(folder, "weight_sync=based")
    assert type(instantiate(based.weight_sync)) is wsync.DistributedWeightSyncScheme
    assert based.collector._target_ == "collectors.distributed.DistributedCollector"


def test_a_registered_backend_needs_no_yaml_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wsync.registry._BACKENDS", {**wsync.registered_backends()})
    wsync.register_backend("registered", "file_backend:FileScheme")
    wsync.register_backend("nowhere", "no_such_module:Scheme")  # in the way of none but itself
    cfg = composed(folder, "weight_sync=registered", "weight_sync.folder=y", "timeout=7")
    assert dict(cfg.weight_sync) == {"_target_": "file_backend.FileScheme", "folder": "y", "timeout": 7}
    assert cfg.collector._target_ == "collectors.MultiAsyncCollector"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("weight_sync=mine weight_sync.timout=3", "no setting is called 'weight_sync.timout'; did you mean "),
        ("weight_sync=mine weight_sync.xyz=3", "no setting is called 'weight_sync.xyz'"),
        ("weight_sync=mine weight_sync.timeout=soon", "weight_sync.timeout=soon: Value 'soon'"),
        ("weight_sync=mine collector=ray", "collector=ray cannot carry FileScheme: choose collector=multi_async, "),
        ("weight_sync=slip", "Key 'timout' not in 'FileSchemeConfig'"),
        ("weight_sync=incomplete", "missing mandatory value: folder"),
        ("weight_sync=absent", "weight_sync._target_=no_such_module.FileScheme: there is no module 'no_such_module'"),
        ("weight_sync=empty", "weight_sync is no scheme: name a subclass of WeightSyncScheme"),
        ("weight_sync=unreadable", "unreadable.yaml"),
        ("weight_sync=mnie", "weight_sync=mnie: there is no such option; did you mean 'mine'?; there are: absent, "),
    ],
)
def test_an_error_is_one_line(folder: Path, overrides: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "--config-dir", str(folder), *overrides.split()])
    with pytest.raises((HydraException, OmegaConfBaseException, YAMLError, ConfigError)) as caught:
        cfg = composed(folder, *overrides.split())
        config = OmegaConf.to_object(cfg)
        assert isinstance(config, learning.config.TrainConfig)
        scheme = instantiate_setting("weight_sync", config.weight_sync)
        collectors.config.check(config.collector, scheme, config.num_workers)
    message = learning.config.describe_error(caught.value)
    assert message is not None and said in message and "\n" not in message
