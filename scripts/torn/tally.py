"""What the workers have seen, counted."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Tally:
    """What was seen.

    Attributes:
        forwards: how many.
        versions: how many different versions, summed over workers.
        mixed: forwards that saw more than one version.
        backwards: forwards of an older version than the one before, in the same worker.
        stale: forwards of an older version than one whose ``send`` had returned before.
        updates: sends that returned.
        seconds: how long it took.
        example: the first bad forward, in words.
    """

    forwards: int = 0
    versions: int = 0
    mixed: int = 0
    backwards: int = 0
    stale: int = 0
    updates: int = 0
    seconds: float = 0.0
    example: str = ""
    _latest: dict[int, float] = field(default_factory=dict)

    def see(self, low: float, high: float, floor: float, worker: int) -> None:
        """Take in one forward of ``worker``."""
        latest = self._latest.get(worker, 0.0)
        self.forwards += 1
        self.versions += high > latest
        faults = (low != high, low < latest, low < floor)
        self.mixed += faults[0]
        self.backwards += faults[1]
        self.stale += faults[2]
        if any(faults) and not self.example:
            self.example = (
                f"worker {worker} saw versions {low:.0f} to {high:.0f}, after {latest:.0f}, floor {floor:.0f}"
            )
        self._latest[worker] = high

    def add(self, other: Tally) -> None:
        """Join what another worker saw."""
        for name in ("forwards", "versions", "mixed", "backwards", "stale"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.example = self.example or other.example

    @property
    def faults(self) -> int:
        """Forwards that broke a promise."""
        return self.mixed + self.backwards + self.stale
