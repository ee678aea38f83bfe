"""The tables of ``docs/api.md``, ``docs/migrate.md``, ``api_rows.md``: names and arguments are there; tests exist."""

import ast
import inspect
import re
import typing
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import wsync

ROOT = Path(__file__).resolve().parents[1]
PAGE = "\n\n".join((ROOT / name).read_text("utf-8") for name in ("docs/api.md", "docs/migrate.md", "tests/api_rows.md"))
NAME = re.compile(r"`((?:wsync|collectors)(?:\.\w+)+)(?:\(([\w, ]+)\))?`")
TEST = re.compile(r"`([\w/]+\.py)::(\w+)(?:::(\w+))?`")


def tables() -> Iterator[tuple[list[str], list[list[str]]]]:
    """The tables of the page: the heading, and the rows."""
    for block in re.findall(r"(?:^\|.*\n)+", PAGE, flags=re.MULTILINE):
        heading, line, *rows = [
            [cell.strip() for cell in re.split(r"(?<!\\)\|", row.strip("|"))] for row in block.splitlines()
        ]
        assert set("".join(line)) <= set("- ")
        yield heading, rows


ROWS = [row for heading, rows in tables() if heading[0] == "documented" for row in rows]
TRANSLATIONS = [row for heading, rows in tables() if heading[0] == "TorchRL" for row in rows]
NAMES = sorted({found for row in [*ROWS, *TRANSLATIONS] for found in NAME.findall(row[1])})


def find(path: str) -> Any:
    """The object at a dotted path."""
    parts = path.split(".")
    found, rest = import_module(parts[0]), parts[1:]
    if rest[0] == "distributed" and parts[0] == "collectors":
        found, rest = import_module("collectors.distributed"), rest[1:]
    for part in rest:
        found = getattr(found, part)
    return found


def arguments(function: Any) -> set[str]:
    """The names of a function's (or constructor's) arguments, with those of ``**options: Unpack[…]``."""
    called = function.__init__ if isinstance(function, type) else function
    names = set[str]()
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            names.add(name)
        elif "Unpack[" in str(parameter.annotation):
            (options,) = typing.get_args(typing.get_type_hints(called, include_extras=True)[name])
            names |= set(typing.get_type_hints(options))
    return names


@cache
def names_in(file: str) -> set[tuple[str, str]]:
    """``(function, "")``, ``(class, "")`` and ``(class, method)`` of a file."""
    found = set[tuple[str, str]]()
    for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add((node.name, ""))
        if isinstance(node, ast.ClassDef):
            found |= {(node.name, method.name) for method in node.body if isinstance(method, ast.FunctionDef)}
    return found


def test_the_tables_are_found() -> None:
    assert len(ROWS) > 100 and len(TRANSLATIONS) > 15


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:60])
def test_a_row_has_a_name_and_tests_that_exist(row: list[str]) -> None:
    documented, here, tests, difference = row
    assert documented and NAME.findall(here), "which name is it here?"
    assert re.sub(NAME, "", here).strip(", ") == "", f"not a name: {here}"
    assert TEST.findall(tests) and re.sub(TEST, "", tests).strip(", ") == "", f"not a list of tests: {tests}"
    for file, name, method in TEST.findall(tests):
        assert (name, method) in names_in(file), f"{file} has no {name} {method}"
        assert (method or name).lower().startswith("test"), name
    assert difference == "" or difference.endswith(".")


@pytest.mark.parametrize("row", TRANSLATIONS, ids=lambda row: row[0])
def test_a_translation_names_something(row: list[str]) -> None:
    assert row[0].startswith("`") and NAME.fullmatch(row[1])


@pytest.mark.parametrize(("path", "given"), NAMES)
def test_a_name_is_imported_and_has_the_arguments(path: str, given: str) -> None:
    found = find(path)
    if given:
        assert {name.strip() for name in given.split(",")} <= arguments(found)


# --- every public name is on one of the pages of docs/reference/, and what is there exists ---


PAGES = Path(__file__).parents[1] / "docs" / "reference"
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
