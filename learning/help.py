"""The text of ``python train.py --help``: the groups with their options, and every setting with its explanation."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigNode, ConfigStore
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

import wsync
from collectors.env_config import EnvConfig
from learning.config_errors import NOT_FOR_WORKERS
from learning.options import PolicyConfig

USAGE = """\
python train.py group=option … setting=value …     one run; its folder is under outputs/
python train.py -m seed=0,1,2 …                    a sweep: every combination of the values
python train.py resume=<folder of a run>           continues that run
python train.py --config-dir <folder> …            adds options of your own: <folder>/<group>/<option>.yaml
python train.py --hydra-help                       the options of the command itself
"""
_COMMON = {"policy.": PolicyConfig, "env.": EnvConfig}
"""The settings that every option of a group has, with a + where its YAML file does not name them."""
_NOT_BESIDE_A_TARGET = ("id", "kwargs", "make")
_HIDDEN = ("hydra", "collector/for", "weight_sync/schema")
_SECTION = re.compile(r"^(Args|Attributes):\n((?:(?: {4}.*)?\n?)+)", re.MULTILINE)
_MARKUP = re.compile(r"(:\w+:)?`+")
_ENTRY = re.compile(r"^ {4}(\w[\w, ]*): (.*(?:\n {8}.*)*)", re.MULTILINE)


def print_help(
    conf: Path, overrides: Sequence[str], folders: Sequence[Path] = (), console: Console | None = None
) -> None:
    """Print the usage, the groups, and the settings that `overrides` compose.

    Args:
        conf: the folder of the project's configs; the configs of the ConfigStore are registered.
        overrides: the overrides on the command line, so that the settings are those of the chosen options.
        folders: config folders of the user.
        console: where to print; the terminal by default.
    """
    console = console or Console(highlight=False)
    console.print(USAGE, markup=False)
    console.print("[bold]Groups and their options[/bold]")
    table = Table(box=None, show_header=False, padding=(0, 2))
    for group, options in _groups([conf, *folders]):
        table.add_row(group, ", ".join(options))
    console.print(table)
    with initialize_config_dir(str(conf), version_base="1.3"):
        searched = [f"hydra.searchpath=['{folder.resolve()}']" for folder in folders]
        cfg = compose("train", overrides=[*searched, *overrides])
    console.print("\n[bold]Settings of this choice[/bold]")
    _print_settings(console, "", cfg)


def _groups(folders: Sequence[Path]) -> Iterator[tuple[str, list[str]]]:
    """Yield each group with its options, from the folders and the ConfigStore; without those that are not chosen.

    The backends that ``learning.validation.check_backend`` refuses are left out as well.
    """
    found: dict[str, set[str]] = {}
    for group, path in ((str(p.parent.relative_to(one)), p) for one in folders for p in one.rglob("*.yaml")):
        if group != "." and not any(part.startswith(".") for part in Path(group).parts):  # .hydra is in run folders
            top, _, nested = group.partition("/")
            found.setdefault(top, set()).add(f"{nested}/{path.stem}" if nested else path.stem)
    for group, options in ConfigStore.instance().repo.items():
        if isinstance(options, dict) and group in {*found, "weight_sync"}:
            nodes = {name.removesuffix(".yaml"): node for name, node in options.items() if isinstance(node, ConfigNode)}
            names = {name for name, node in nodes.items() if _class_of(node) not in NOT_FOR_WORKERS}
            found.setdefault(group, set()).update(name for name in names if not name.startswith("base_"))
    for group in sorted(found):
        hidden = [path.partition("/")[2] + "/" for path in _HIDDEN if path.startswith(f"{group}/")]
        options = [name for name in sorted(found[group]) if not name.startswith(tuple(hidden))]
        if group not in _HIDDEN and options:
            yield group, options


def _class_of(node: ConfigNode) -> str:
    return str(OmegaConf.select(node.node, "_target_")).rpartition(".")[2]


def _print_settings(console: Console, prefix: str, cfg: DictConfig) -> None:
    target = OmegaConf.select(cfg, "_target_")
    explained = {**_unmarked(get_object(target) if target else None), **_unmarked(OmegaConf.get_type(cfg))}
    plain = OmegaConf.to_container(cfg, resolve=False, enum_to_str=True)
    assert isinstance(plain, dict)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    groups: dict[str, DictConfig] = {}
    for name, value in ((str(key), value) for key, value in plain.items()):
        node = None if OmegaConf.is_missing(cfg, name) or OmegaConf.is_interpolation(cfg, name) else cfg[name]
        if isinstance(node, DictConfig) and not prefix:
            groups[name] = node
        elif not name.startswith("_"):
            table.add_row(*map(Text, (f"{prefix}{name}={as_override(value)}", explained.get(name, ""))))
    if prefix in _COMMON and target and OmegaConf.get_type(cfg) is dict:  # of a YAML file of the user's
        common = _COMMON[prefix]
        texts = _unmarked(common)
        for field in fields(common):
            if field.name in texts and field.name not in plain and field.name not in _NOT_BESIDE_A_TARGET:
                default = field.default_factory() if field.default is MISSING else field.default  # pyright: ignore
                table.add_row(*map(Text, (f"+{prefix}{field.name}={as_override(default)}", texts[field.name])))
    console.print(Padding(table, (0, 0, 1, 2)))
    for group, node in groups.items():
        called = OmegaConf.select(node, "_target_") or ("gymnasium.make" if group == "env" else "")
        console.print(f"  [bold]{group}[/bold]  {called}")
        _print_settings(console, f"{group}.", node)


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


def _unmarked(documented: Any) -> dict[str, str]:
    """Return `explanations` without the marks of code and references."""
    return {name: " ".join(_MARKUP.sub("", text).split()) for name, text in explanations(documented).items()}
