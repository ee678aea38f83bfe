"""A control without the gate, which does tear. That none does with it, the contract suite shows for every backend,
``tests/integration/test_parts.py`` for collectors, and ``scripts/check_torn.py`` in millions of forwards.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from check_torn import BACKENDS, standalone


@pytest.mark.slow
def test_without_the_gate_forwards_are_torn() -> None:
    """Of copied weights. Published ones are bound on the way into the gate; without it they stay whole."""
    tally = standalone(BACKENDS["multiprocess"], forwards=10**6, workers=1, mib=4.0, seconds=30.0, bypass=True)
    assert tally.mixed > 0, tally
