"""Make the report of a sweep again, from its runs' files: python scripts/report.py outputs/<date>/<time>-sweep."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from collectors.output import keep_output_harmless
from learning.reporting.files import FolderError
from learning.reporting.sweep import report


def main(
    folder: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="The sweep's folder, with a folder for each run.")
    ],
) -> None:
    """Print the table, and write sweep.html and the pictures into FOLDER."""
    try:
        report(folder)
    except FolderError as error:
        sys.exit(f"report.py: {error}")


if __name__ == "__main__":
    keep_output_harmless()
    typer.run(main)
