"""Which inner loops are chosen at import: the compiled ones, unless they are missing, stale or switched off."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig

import pytest

from wsync import loops


def test_it_was_built_where_that_is_possible() -> None:
    if os.environ.get("WSYNC_NATIVE") == "0":
        pytest.skip("the compiled classes are switched off")
    compiler = shlex.split(sysconfig.get_config_var("CC") or "cc")
    program = "#include <Python.h>\n#include <poll.h>\n#include <pthread.h>\n"
    include = sysconfig.get_paths()["include"]
    try:
        compiles = subprocess.run(
            [*compiler, "-fsyntax-only", "-xc", "-I", include, "-"], input=program, text=True, check=False, timeout=250
        )
    except FileNotFoundError:
        pytest.skip("there is no C compiler here")
    if compiles.returncode:
        pytest.skip("Python's headers are not here")
    assert loops.COMPILED, "pip install -e . builds wsync/csrc"


def test_it_can_be_switched_off() -> None:
    code = "import wsync.loops as l; assert not l.COMPILED and l.WorkerSlot.__module__ == 'wsync.loops.worker_slot'"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "WSYNC_NATIVE": "0"}, check=True, timeout=250)


def test_a_stale_build_is_told_and_not_used() -> None:
    code = """
import sys, types, warnings
sys.modules["wsync._loops"] = types.SimpleNamespace(REVISION=-1)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    import wsync.loops
assert not wsync.loops.COMPILED and any("builds it again" in str(one.message) for one in told), told
"""
    environment = {name: value for name, value in os.environ.items() if name != "WSYNC_NATIVE"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=250)
