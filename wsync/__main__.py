"""The command ``wsync``: the version, and what a report of a problem should have."""

from __future__ import annotations

import argparse
import platform
from importlib.metadata import PackageNotFoundError, version

import wsync
from wsync.native import native, why_not
from wsync.registry import registered_backends

PACKAGES = ("torch", "tensordict", "numpy", "gymnasium", "ray", "hydra-core")


def report() -> str:
    """Return the versions of wsync and of what it uses, and the names of the backends."""
    extension = "with the C extension" if native is not None else f"without the C extension ({why_not})"
    lines = [f"wsync {wsync.__version__}, {extension}"]
    lines.append(f"Python {platform.python_version()}, {platform.platform()}")
    for package in PACKAGES:
        try:
            lines.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            lines.append(f"{package}: not installed")
    return "\n".join([*lines, f"backends: {', '.join(registered_backends())}"])


def main() -> None:
    """Print the version with ``--version``, else the report."""
    parser = argparse.ArgumentParser(prog="wsync", description="Print what a report of a problem should have.")
    parser.add_argument("--version", action="version", version=f"wsync {wsync.__version__}")
    parser.parse_args()
    print(report())


if __name__ == "__main__":
    main()
