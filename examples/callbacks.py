"""Callbacks for train.py: an evaluation every n frames that keeps the best policy, TensorBoard, and a CSV file.

python train.py --config-dir examples 'callbacks=[{_target_: callbacks.Evaluation, every: 20000}]'
python train.py --config-dir examples 'callbacks=[{_target_: callbacks.TensorBoard}, {_target_: callbacks.CsvRows}]'
python scripts/evaluate.py outputs/<date>/<run>/best
"""

import csv
import shutil

from tensordict.nn import InteractionType

from collectors import Collector
from learning import checkpoint
from learning.reporting import Reporter
from learning.reporting.wandb_logger import flat


class Evaluation(Reporter):
    """Plays episodes with the most likely actions; the run's folder gets ``evaluation.csv``, and the best policy."""

    def __init__(self, every=50_000, episodes=10):
        self.every, self.episodes = every, episodes
        self.next, self.best = every, None

    def begin(self, folder, config):
        self.folder = folder

    def update(self, row):
        if row.frames < self.next:
            return
        self.next = row.frames + self.every
        returns, policy = [], self.policy()
        with Collector(
            self.make_env, policy, frames_per_batch=200, exploration_type=InteractionType.DETERMINISTIC
        ) as collector:
            while len(returns) < self.episodes:
                step = next(collector)["next"]
                returns += step["episode_return"][step["done"]].tolist()
        mean = sum(returns) / len(returns)
        with open(self.folder / "evaluation.csv", "a", newline="") as file:
            csv.writer(file).writerow([row.frames, row.version, mean])
        if self.best is None or mean > self.best:
            self.best, best = mean, self.folder / "best"
            best.mkdir(exist_ok=True)
            shutil.copy(self.folder / "config.yaml", best)
            checkpoint.save(best, {"learner": {"policy": policy.state_dict()}})


class TensorBoard(Reporter):
    """Writes the numbers of each row for `tensorboard --logdir outputs`; needs the package tensorboard."""

    def begin(self, folder, config):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(folder)

    def update(self, row):
        for name, value in flat(row.as_dict()).items():
            self.writer.add_scalar(name, value, row.frames)

    def finish(self, summary):
        self.writer.close()


class CsvRows(Reporter):
    """Writes the numbers of each row to ``rows.csv``; the columns are those of the first row with an update."""

    def begin(self, folder, config):
        self.path, self.columns = folder / "rows.csv", None

    def update(self, row):
        figures = flat(row.as_dict())
        if self.columns is None and row.weight_sync is not None:
            self.columns = list(figures)
            self.path.write_text(",".join(self.columns) + "\n")
        if self.columns is not None:
            with open(self.path, "a", newline="") as file:
                csv.writer(file).writerow(figures.get(name, "") for name in self.columns)
