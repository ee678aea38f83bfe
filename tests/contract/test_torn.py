"""No torn forward in a collector under continuous sends; and a control that does tear, without the gate."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from check_torn import BACKENDS, Tally, in_collector, standalone

pytestmark = pytest.mark.slow
SHARE = 7_000  # forwards of each backend
ACTING = {"shared_mem-published": SHARE, "distributed": SHARE // 2}
"""`scripts/check_torn.py` takes millions, and every backend; the contract suite has a test of every backend."""


def check(tally: Tally, forwards: int) -> None:
    assert not tally.example
    assert tally.forwards >= forwards, f"only {tally.forwards} forwards in {tally.seconds:.0f} s"
    assert tally.versions > 20, f"too few versions were seen: {tally}"


@pytest.mark.parametrize(("backend", "share"), ACTING.items())
def test_no_forward_of_a_collector_is_torn(backend: str, share: int) -> None:
    check(in_collector(BACKENDS[backend], forwards=share, workers=2, mib=0.25, seconds=60.0), share)


def test_without_the_gate_forwards_are_torn() -> None:
    """The control: copied weights. Published ones are bound on the way into the gate; without it they stay whole."""
    tally = standalone(BACKENDS["multiprocess"], forwards=10**6, workers=1, mib=4.0, seconds=30.0, bypass=True)
    assert tally.mixed > 0, tally
