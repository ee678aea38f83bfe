"""The protocol under a simulated clock and network: no history breaks a promise, and each planted bug is found."""

from collections.abc import Callable
from typing import Any

import pytest

from wsync import workers
from wsync.control.session import SessionInbox, WorkerSession, wait_for
from wsync.control.wire import Verify
from wsync.testing.simulation import simulate
from wsync.update import Cause, Stage, Update

MANY = [pytest.param(first, marks=pytest.mark.slow) for first in range(150, 2150, 50)]


@pytest.mark.parametrize("first", [0, 50, 100, *MANY])
def test_no_history_breaks_a_promise(first: int) -> None:
    events, orders, bad = simulate(first, 50)
    assert not bad
    names = ("kill", "cut", "stop", "disconnect", "commit", "abort", "refuse", "verify", "fetch", "layout")
    assert len(orders) > 0.98 * 50 and min(events[name] for name in names) > 0


# --- does it find anything? Each bug is one small change of the code ---

state, decide, offer = WorkerSession.state, WorkerSession.decide, WorkerSession.offer
settled = SessionInbox.settled


def offer_the_older(self: WorkerSession, update: Update) -> None:
    waiting = self._waiting.copy()
    offer(self, update)
    if waiting and not update.undecided and self.cause is None:
        self._waiting = waiting


def end_without_a_word(self: WorkerSession, cause: str) -> None:
    self.cause = cause
    self._link.close(ConnectionError(cause))


async def wait_for_some(sessions: Any, version: int, stage: Stage, deadline: float | None) -> dict[int, Cause]:
    causes = await wait_for(sessions, version, stage, deadline)
    return {} if stage == "received" and len(causes) < len(sessions) else causes


async def take_any_answer(self: WorkerSession, digests: dict[str, int]) -> str | None:
    self._questions, before = self._questions + 1, self.verified
    self.post(Verify(self._questions, digests))
    await self._changes.until(lambda: self.verified is not before or self.cause is not None)
    return self.verified.error if self.verified is not before else None


BUGS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "an_ack_without_its_version": (WorkerSession, "state", lambda self, v, stage: state(self, v - 1, stage)),
    "no_abort": (WorkerSession, "decide", lambda self, version, commit: decide(self, version, commit=True)),
    "the_older_update_wins": (WorkerSession, "offer", offer_the_older),
    "a_lost_death": (WorkerSession, "end", end_without_a_word),
    "a_commit_before_all_have_prepared": (workers, "wait_for", wait_for_some),
    "an_answer_to_another_question": (WorkerSession, "verify", take_any_answer),
    "a_refused_version_stays": (SessionInbox, "settled", lambda self, one, error: error or settled(self, one, error)),
}
"""By name: where a function is, its name there, and what takes its place."""


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*BUGS[bug])
    assert any(simulate(seed, 1)[2] for seed in range(1000))
