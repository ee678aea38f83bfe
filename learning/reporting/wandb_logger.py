"""Weights & Biases, in a thread of its own: it does not delay the start of a run, and its errors do not end one."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learning.progress import Row
from learning.reporting import Reporter
from learning.reporting.files import flat
from wsync.metrics import ledger

log = logging.getLogger(__name__)


@dataclass(eq=False)
class WandbLogger(Reporter):
    """Sends rows to Weights & Biases: online if the user is logged in, offline otherwise.

    What is None is that of wandb's variable, ``WANDB_PROJECT`` for instance, or a default where that is not set.

    A thread imports and starts wandb `start_after` seconds into the run, or at its end, since that takes more processor
    time than a short run; rows from before are sent then, as they were, except wandb's "relative time (process)".

    Args:
        project: wandb's project; None: WANDB_PROJECT, else "wsync".
        group: wandb's group; None: WANDB_RUN_GROUP, else the environment and the algorithm. A sweep's runs share one.
        id: wandb's id of the run; in a sweep, ``WANDB_RUN_ID`` and the number of the run.
        tags: wandb's tags; none: WANDB_TAGS, else the environment, the scheme and the algorithm.
        mode: "online", "offline" or "disabled"; None: WANDB_MODE, else online if logged in, else offline.
        start_after: seconds before wandb is started.
        close_within: seconds that the end of a run waits for the remaining rows to be sent.
    """

    project: str | None = None
    entity: str | None = None
    group: str | None = None
    id: str | None = None
    tags: Sequence[str] = ()
    mode: str | None = None
    start_after: float = 10.0
    close_within: float = 60.0

    def __post_init__(self) -> None:
        self._init: dict[str, Any] = {}
        self._rows: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._ending = threading.Event()
        self._summary: dict[str, Any] = {}
        self._where: str | None = None
        self._thread: threading.Thread | None = None

    def begin(self, folder: Path, config: dict[str, Any]) -> None:
        kinds = [config.get(one, {}).get("_target_", "").rpartition(".")[2] for one in ("weight_sync", "algorithm")]
        env = config.get("env", {}).get("id", "")
        self._init = {"dir": str(folder), "config": config, "entity": self.entity, "id": self.id, "job_type": "train"}
        for name, given, variable, default in (
            ("project", self.project, "WANDB_PROJECT", "wsync"),
            ("name", None, "WANDB_NAME", folder.name),
            ("group", self.group, "WANDB_RUN_GROUP", f"{env} {kinds[1]}"),
            ("tags", list(self.tags), "WANDB_TAGS", [one for one in (env, *kinds) if one]),
        ):  # wandb reads a variable where it is given None
            self._init[name] = given or (None if os.environ.get(variable) else default)
        self._thread = threading.Thread(target=self._run, name="wandb", daemon=True)  # wandb may hang at the end
        self._thread.start()

    def update(self, row: Row) -> None:
        if self._thread is not None and self._thread.is_alive():
            workers = {f"{one['model']}/{one['worker']}": one for one in ledger()}
            self._rows.put({**row.as_dict(), "ledger": workers, "_timestamp": time.time()})

    def finish(self, summary: dict[str, Any]) -> None:
        self._summary = summary

    def conclude(self) -> None:
        if self._thread is None:
            return
        self._rows.put(None)
        self._ending.set()
        self._thread.join(min(self.close_within, threading.TIMEOUT_MAX))
        if self._thread.is_alive():
            log.warning("wandb: not done within %g s; `wandb sync` sends the rest", self.close_within)
        elif self._where is not None:
            print(f"wandb: {self._where}")

    def _run(self) -> None:
        self._ending.wait(min(self.start_after, threading.TIMEOUT_MAX))
        try:
            self._send_all()
        except Exception as error:  # noqa: BLE001  (an error of the dashboard must not end a run)
            log.warning("wandb: logging stopped, the run continues: %s: %s", type(error).__name__, error)

    def _send_all(self) -> None:
        import wandb  # slow to import, and only needed here

        quiet: dict[str, Any] = {"console": "off", "silent": True}
        if self.close_within:  # 0: nothing waits for wandb
            quiet["init_timeout"] = self.close_within / 2
        unset = {name: value for name, value in quiet.items() if f"WANDB_{name.upper()}" not in os.environ}
        mode: Any = self.mode or os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False) else "offline")
        options: Any = {**self._init, "settings": wandb.Settings(**unset), "reinit": "create_new"}
        try:
            run = wandb.init(**options, mode=mode)
        except wandb.Error as error:
            log.warning("wandb: going offline: %s", error)
            run = wandb.init(**options, mode="offline")
        run.define_metric("frames")
        run.define_metric("*", step_metric="frames")
        while (row := self._rows.get()) is not None:
            run.log(flat(row))
        if pictures := {one.stem: wandb.Image(str(one)) for one in sorted(Path(self._init["dir"]).glob("*.png"))}:
            run.log(pictures)
        run.summary.update(self._summary)
        self._where = f"offline; send it with: wandb sync {Path(run.dir).parent}" if run.offline else run.url
        run.finish(exit_code=1 if self._summary.get("status") == "failed" else 0)
