"""The whole contract suite for the example's backend: all of it is made of the public base classes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))  # workers import it, too

from custom_backend import TestDirectory as TestDirectory

pytestmark = pytest.mark.slow  # tests/integration/test_docs.py runs some of it, as its author does
