"""Every public name is on one of the pages of docs/reference/, and what is there exists."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

import wsync

PAGES = Path(__file__).parents[2] / "docs" / "reference"
LISTED = {name for page in PAGES.glob("*.md") for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)}
OLDER_NAMES = {"SyncDataCollector", "MultiSyncDataCollector", "MultiaSyncDataCollector"}  # of collectors.Collector …


@pytest.mark.parametrize("package", ["wsync", "collectors", "collectors.distributed", "learning", "wsync.testing"])
def test_every_public_name_has_a_place(package: str) -> None:
    names = set(import_module(package).__all__) - OLDER_NAMES - {"transforms"}
    last = {name.rpartition(".")[2] for name in LISTED if name.startswith(f"{package}.")}
    assert not names - last


def test_every_transform_has_a_place() -> None:
    functions = {"Transform", "compose"}  # the type, and what a scheme does with a list
    assert {f"wsync.transforms.{name}" for name in set(wsync.transforms.__all__) - functions} <= LISTED


@pytest.mark.parametrize("path", sorted(LISTED))
def test_what_has_a_place_exists(path: str) -> None:
    module, _, name = path.rpartition(".")
    assert hasattr(import_module(module), name)
