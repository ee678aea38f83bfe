"""The command ``wsync``: what a report of a problem should have."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import wsync
from wsync.native import native, why_not
from wsync.registry import registered_backends

PACKAGES = ("torch", "tensordict", "numpy", "gymnasium", "ray", "hydra-core")


def main() -> None:
    """Print the versions of wsync and of what it uses, and the names of the backends."""
    extension = "with the C extension" if native is not None else f"without the C extension ({why_not})"
    print(f"wsync {wsync.__version__}, {extension}")
    print(f"Python {platform.python_version()}, {platform.platform()}")
    for package in PACKAGES:
        try:
            print(package, version(package))
        except PackageNotFoundError:
            print(f"{package}: not installed")
    print("backends:", *registered_backends())


if __name__ == "__main__":
    main()
