"""Which inner loops are chosen at import: the compiled ones, unless they are missing, stale or switched off."""

from __future__ import annotations

import os
import shlex
import subprocess
import sysconfig
from pathlib import Path

import pytest
from programs import run_program

from wsync import loops

ANEW = """
import os, sys, types, warnings
for name in [name for name in sys.modules if name.partition(".")[0] == "wsync"]:
    del sys.modules[name]
os.environ.pop("WSYNC_NATIVE", None)
"""


def test_it_was_built_where_that_is_possible() -> None:
    if os.environ.get("WSYNC_NATIVE") == "0":
        pytest.skip("the compiled classes are switched off")
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")  # as setuptools does
    program = "#include <Python.h>\n#include <poll.h>\n#include <pthread.h>\n"
    include = sysconfig.get_paths()["include"]
    try:
        compiles = subprocess.run(
            [*compiler, "-fsyntax-only", "-xc", "-I", include, "-"], input=program, text=True, check=False, timeout=250
        )
    except FileNotFoundError:
        pytest.skip("there is no C compiler here")
    if compiles.returncode:
        pytest.skip("there is no C compiler here, or Python's headers are not")
    assert loops.COMPILED, "pip install -e . builds wsync/csrc"


def import_anew(folder: Path, code: str) -> None:
    """Run ``code`` where torch is imported, and wsync is not."""
    (folder / "program.py").write_text(ANEW + code)
    done = run_program(folder / "program.py", folder=folder)
    assert done.returncode == 0, done.stderr


def test_it_can_be_switched_off(tmp_path: Path) -> None:
    code = """
os.environ["WSYNC_NATIVE"] = "0"
import wsync.loops
assert not wsync.loops.COMPILED and wsync.loops.WorkerSlot.__module__ == "wsync.loops.worker_slot"
"""
    import_anew(tmp_path, code)


def test_a_stale_build_is_told_and_not_used(tmp_path: Path) -> None:
    code = """
sys.modules["wsync._loops"] = types.SimpleNamespace(REVISION=-1)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    import wsync.loops
assert not wsync.loops.COMPILED and any("builds it again" in str(one.message) for one in told), told
"""
    import_anew(tmp_path, code)
