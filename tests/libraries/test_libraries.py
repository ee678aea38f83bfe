"""wsync inside other libraries, each the real one: the examples run, and a worker that dies is named or replaced.

``make libraries`` installs them.
"""

import multiprocessing
import os
import re
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import run_python
from tensordict.nn import TensorDictModule
from torch import nn

import wsync

ROOT = Path(__file__).parents[2]
EXAMPLES = {
    **dict.fromkeys(("sb3", "sb3_actors", "sb3_normalized"), ("stable_baselines3", r"version (\d+): return")),
    "torchrl_collector": ("torchrl", r"(\d+) frames, of which (?:[89]\d|100)%"),
    "rllib": ("ray.rllib", r"versions \[(\d+), \1\]"),
    "hugging_face": ("accelerate", r"version (\d+): \[0, 1, 2"),
    "lightning_module": ("lightning", r"version (\d+): (?:[6-9]\d|100)% right"),
}
pytestmark = pytest.mark.slow


def library(name: str) -> Any:
    return pytest.importorskip(name, reason=f"needs {name}: make libraries", exc_type=ImportError)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    needed, pattern = EXAMPLES[name]
    library(needed)
    program = ROOT / "examples" / "libraries" / f"{name}.py"
    done = run_python(program, folder=tmp_path, timeout=1000, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stdout + done.stderr
    found = [int(version) for version in re.findall(pattern, done.stdout)]
    assert len(found) >= 3 and found == sorted(found), done.stdout


def join_and_die(scheme: wsync.WeightSyncScheme, make: Any) -> None:
    scheme.init_on_receiver("policy", model=make("MlpPolicy", "CartPole-v1", device="cpu").policy, worker_idx=0)
    scheme.connect()
    os.kill(os.getpid(), signal.SIGKILL)


def test_training_goes_on_without_a_player_that_has_died() -> None:
    sb3 = library("stable_baselines3")
    from wsync.integrations.stable_baselines3 import WsyncCallback

    model, errors = sb3.PPO("MlpPolicy", "CartPole-v1", n_steps=64, device="cpu"), list[Exception]()
    with wsync.SharedMemWeightSyncScheme() as scheme:
        scheme.init_on_sender("policy", model=model.policy, num_workers=1)
        player = multiprocessing.get_context("spawn").Process(target=join_and_die, args=(scheme, sb3.PPO))
        player.start()
        scheme.connect(processes=[player])
        player.join()
        model.learn(256, callback=WsyncCallback(scheme, on_worker_error=errors.append))
    assert model.num_timesteps == 256
    assert [type(error) for error in errors] == [wsync.WorkerDied, *[wsync.NotConnected] * 3]


def make_env() -> Any:
    from torchrl.envs import GymEnv  # pyright: ignore[reportMissingImports]

    return GymEnv("CartPole-v1", categorical_action_encoding=True)


class Greedy(nn.Linear):
    def forward(self, observation: Any) -> Any:
        return super().forward(observation).argmax(-1)


def make_policy() -> TensorDictModule:
    return TensorDictModule(Greedy(4, 2), in_keys=["observation"], out_keys=["action"])


def test_a_worker_of_torchrl_that_dies_is_named() -> None:
    collectors = library("torchrl.collectors")
    from wsync.integrations.torchrl import TorchRLScheme

    schemes = {"policy": TorchRLScheme(wsync.SharedMemWeightSyncScheme(timeout=20.0))}
    collector = collectors.MultiSyncCollector(
        [make_env, make_env], make_policy(), frames_per_batch=16, total_frames=160, weight_sync_schemes=schemes
    )
    try:
        assert next(iter(collector)).numel() == 16
        collector.update_policy_weights_()
        os.kill(collector.procs[1].pid, signal.SIGKILL)
        with pytest.raises(wsync.WorkerDied, match="worker 1"):
            while True:  # an update that the worker has installed before it died was no error
                collector.update_policy_weights_()
    finally:
        collector.shutdown()


def test_algorithms_that_send_weights_in_a_way_of_their_own_are_refused() -> None:
    impala = library("ray.rllib.algorithms.impala")
    import ray

    from wsync.integrations.rllib import WsyncCallback

    config = impala.IMPALAConfig().environment("CartPole-v1").env_runners(num_env_runners=1).learners(num_learners=0)
    try:
        with pytest.raises(ValueError, match="IMPALA sends weights in a way of its own"):
            config.callbacks(partial(WsyncCallback, wsync.SharedMemWeightSyncScheme())).build_algo()
    finally:
        ray.shutdown()


def test_an_env_runner_that_dies_is_replaced() -> None:
    ppo = library("ray.rllib.algorithms.ppo")
    import ray

    from wsync.integrations.rllib import WsyncCallback

    config = ppo.PPOConfig().environment("CartPole-v1").env_runners(num_env_runners=2).learners(num_learners=0)
    config.training(train_batch_size_per_learner=256, minibatch_size=64, num_epochs=1)
    algorithm = config.callbacks(partial(WsyncCallback, wsync.SharedMemWeightSyncScheme())).build_algo()
    try:
        runners = partial(algorithm.env_runner_group.foreach_env_runner, local_env_runner=False)
        algorithm.train()
        doomed = runners(lambda runner: (runner.worker_index, os.getpid()))[1][1]
        os.kill(doomed, signal.SIGKILL)
        processes = [doomed]
        while doomed in processes or len(processes) < 2:  # RLlib restarts it in one of the next iterations
            algorithm.train()
            processes = runners(lambda runner: os.getpid())
        algorithm.train()
        versions = runners(lambda runner: runner.wsync.version)
        assert versions[0] == versions[1] > 2
    finally:
        algorithm.stop()
        ray.shutdown()


class Halves:
    """A callback of both libraries that changes the weights when the training has ended."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def on_train_end(self, *_: Any, **__: Any) -> None:
        with torch.no_grad():
            [parameter.mul_(0.5) for parameter in self.model.parameters()]


def fit_with_lightning(model: nn.Module, scheme: wsync.WeightSyncScheme, every: int) -> Callable[[], None]:
    lightning = library("lightning")
    from wsync.integrations.lightning import WsyncCallback

    class Module(lightning.LightningModule):
        inner = model

        def training_step(self, batch: Any, _: int) -> Any:
            return model(batch).pow(2).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(model.parameters(), lr=0.1)

    class Changes(Halves, lightning.Callback): ...

    module, callbacks = Module(), [WsyncCallback(scheme, every), Changes(model)]
    quiet = {f"enable_{name}": False for name in ("checkpointing", "progress_bar", "model_summary")}

    def fit() -> None:
        trainer = lightning.Trainer(max_steps=4, accelerator="cpu", callbacks=callbacks, logger=False, **quiet)
        trainer.fit(module, torch.utils.data.DataLoader(torch.randn(16, 2), batch_size=4))

    return fit


def fit_with_transformers(model: nn.Module, scheme: wsync.WeightSyncScheme, every: int) -> Callable[[], None]:
    library("accelerate")  # its Trainer needs that
    transformers = library("transformers")
    from wsync.integrations.transformers import WsyncCallback

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: torch.Tensor) -> Any:
            return {"loss": model(x).pow(2).mean()}

    class Changes(Halves, transformers.TrainerCallback): ...

    arguments = transformers.TrainingArguments(use_cpu=True, max_steps=4, report_to=[], save_strategy="no")
    callbacks = [Changes(model), WsyncCallback(scheme, every)]
    data = [{"x": torch.randn(2)} for _ in range(16)]
    trainer = transformers.Trainer(Loss(), arguments, train_dataset=data, callbacks=callbacks)
    return trainer.train


@pytest.mark.parametrize("make_fit", [fit_with_lightning, fit_with_transformers])
@pytest.mark.parametrize("every", [1, 3, 8])
def test_each_training_ends_with_its_weights_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_fit: Any, every: int
) -> None:
    monkeypatch.chdir(tmp_path)
    model, copy = nn.Linear(2, 1), nn.Linear(2, 1)
    with wsync.StoreWeightSyncScheme(tmp_path) as scheme, wsync.StoreWeightSyncScheme(tmp_path) as reader:
        scheme.init_on_sender(model=model)
        scheme.connect()
        reader.init_on_receiver(model=copy, worker_idx=0)
        reader.connect()
        fit = make_fit(model, scheme, every)
        for _ in range(3):
            fit()
            while reader.version < scheme.sent_version:
                reader.receive()
            assert torch.equal(copy.weight, model.weight)
