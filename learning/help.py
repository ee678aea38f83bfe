"""The text of ``python train.py --help``: the groups with their options, and every setting with its explanation."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table
from rich.text import Text

import wsync

USAGE = """\
python train.py group=option … setting=value …     one run; its folder is under outputs/
python train.py -m seed=0,1,2 …                    a sweep: every combination of the values
python train.py resume=<folder of a run>           continues that run
python train.py --config-dir <folder> …            adds options of your own: <folder>/<group>/<option>.yaml
python train.py --hydra-help                       the options of the command itself
"""
_SECTION = re.compile(r"^(Args|Attributes):\n((?:(?: {4}.*)?\n?)+)", re.MULTILINE)
_ENTRY = re.compile(r"^ {4}(\w[\w, ]*): (.*(?:\n {8}.*)*)", re.MULTILINE)


def print_help(
    conf: Path, overrides: Sequence[str], folders: Sequence[Path] = (), console: Console | None = None
) -> None:
    """Print the usage, the groups, and the settings that `overrides` compose.

    `conf` is the folder of the project's configs, and `folders` are those of the user.
    """
    console = console or Console(highlight=False)
    searched = [f"hydra.searchpath=['{folder.resolve()}']" for folder in folders]
    with initialize_config_dir(str(conf), version_base="1.3"):
        cfg = compose("train", overrides=[*searched, *overrides])
    console.print(f"{USAGE}\n[bold]Groups and their options[/bold]")
    table = Table(box=None, show_header=False, padding=(0, 2))
    for group in ("algorithm", "chaos", "collector", "env", "experiment", "logger", "policy", "weight_sync"):
        files = [(folder / group, path) for folder in (conf, *folders) for path in folder.glob(f"{group}/**/*.yaml")]
        options = {str(path.relative_to(at).with_suffix("")) for at, path in files}
        if group == "weight_sync":
            options |= set(wsync.registered_backends())
        table.add_row(group, ", ".join(sorted(options)))
    console.print(table)
    console.print("\n[bold]Settings of this choice[/bold]")
    _print_settings(console, "", cfg)


def _print_settings(console: Console, prefix: str, cfg: DictConfig) -> None:
    target = OmegaConf.select(cfg, "_target_")
    said = {**explanations(get_object(target) if target else None), **explanations(OmegaConf.get_type(cfg))}
    plain = OmegaConf.to_container(cfg, resolve=False, enum_to_str=True)
    assert isinstance(plain, dict)
    groups = [name for name, value in plain.items() if isinstance(value, dict) and not prefix]
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name in (str(name) for name in plain if name not in groups and not str(name).startswith("_")):
        explained = re.sub(r"(:\w+:)?`+", "", said.get(name, ""))
        table.add_row(Text(f"  {prefix}{name}={as_override(plain[name])}"), Text(explained))
    console.print(table)
    for group in map(str, groups):
        console.print(f"\n  [bold]{group}[/bold]  {OmegaConf.select(cfg[group], '_target_') or ''}")
        _print_settings(console, f"{group}.", cfg[group])


def as_override(value: Any) -> str:
    """Return a value as the command line takes it: as YAML, on one line."""
    return " ".join(yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").split())


def explanations(documented: Any) -> dict[str, str]:
    """Return ``{name: text}`` of the sections Args and Attributes of a docstring, and of those of base classes.

    Where the text is only "see ``Name``", with a public name of ``wsync``, it is the one there.
    """
    found: dict[str, str] = {}
    for one in inspect.getmro(documented) if inspect.isclass(documented) else [documented]:
        made_by = one.__dict__.get("__init__") if inspect.isclass(one) else None
        for documented_here in (one, made_by):
            for _, body in _SECTION.findall(inspect.cleandoc(getattr(documented_here, "__doc__", None) or "") + "\n"):
                for names, text in _ENTRY.findall(body):
                    for name in names.split(","):
                        found.setdefault(name.strip(), " ".join(text.split()))
    for name, text in found.items():
        if (other := re.fullmatch(r"see ``(\w+)``\.", text)) and other[1] in wsync.__all__:
            found[name] = explanations(getattr(wsync, other[1])).get(name, text)
    return found
