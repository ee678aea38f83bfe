"""Hooks of MkDocs: the tables of ``docs/configuration.md``, from the structured configs and ``conf/``; wide tables."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Collection, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigNode, ConfigStore
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

ROOT = Path(__file__).parents[1]
CONF = ROOT / "conf"
MARKER = "<!-- generated: configuration -->"
sys.path.insert(0, str(ROOT))

import wsync  # noqa: E402
from learning.config import register_configs  # noqa: E402
from learning.options import TrainConfig  # noqa: E402

_SECTION = re.compile(r"^(Args|Attributes):\n((?:(?: {4}.*)?\n?)+)", re.MULTILINE)
_COMMENT = re.compile(r"^(\w+):.*?  # (.*)$", re.MULTILINE)  # of a setting in a YAML file
_ENTRY = re.compile(r"^ {4}(\w[\w, ]*): (.*(?:\n {8}.*)*)", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return a page's text with the tables in place of the marker. Called by MkDocs for each page."""
    return markdown.replace(MARKER, configuration()) if MARKER in markdown else markdown


def on_page_content(html: str, **_: Any) -> str:
    """Return a page's HTML in which long code in cells of tables may wrap after ``/ : . _ (``. Called for each page."""
    cells = re.compile(r"(?<=<td>)(?:(?!</td>).)*<code>(?:(?!</td>).)*", re.DOTALL)
    code = re.compile(r"(?<=<code>)[^<]{30,}")
    return cells.sub(lambda cell: code.sub(lambda one: re.sub(r"([/._(]|::)", r"\1<wbr>", one[0]), cell[0]), html)


def configuration() -> str:
    """Return the settings of a run, and each group with its options and their settings, in Markdown."""
    register_configs()
    groups = [field.name for field in fields(TrainConfig) if field.type == "Any"]
    parts = ["## The run", "", *_settings("", TrainConfig, CONF / "train.yaml", skip=groups)]
    parts += [*_file(CONF / "train.yaml")]
    for group in groups:
        parts += [f"## {group}", "", *_group(group)]
    parts += ["## experiment", "", *_options("experiment", {})]
    return "\n".join(parts)


def _group(group: str) -> Iterator[str]:
    """Yield the lines of a group: the table of its options, and the settings of each of them."""
    configs = ConfigStore.instance().repo[group].items()
    stored = {name.removesuffix(".yaml"): one.node for name, one in configs if isinstance(one, ConfigNode)}
    bases = {name.removeprefix("base_"): node for name, node in stored.items() if name.startswith("base_")}
    yield from _options(group, bases)
    for name, node in bases.items():
        is_option = name in stored or (CONF / group / f"{name}.yaml").exists()
        title = f"Any {group}" if len(bases) == 1 else _users(group, name)
        yield f"### {f'{group}={name}' if is_option else title}"
        yield ""
        yield from _settings(group, node, CONF / group / f"{name}.yaml")


def _users(group: str, base: str) -> str:
    """Return the options with files that begin with a structured config: "policy=gru, policy=lstm"."""
    files = sorted((CONF / group).glob("*.yaml"))
    return ", ".join(f"{group}={one.stem}" for one in files if f"- base_{base}\n" in one.read_text(encoding="utf-8"))


def _options(group: str, bases: dict[str, Any]) -> Iterator[str]:
    """Yield the table of a group's options, and the content of their files."""
    paths = {path.stem: path for path in sorted((CONF / group).glob("*.yaml"))}
    yield "| option | |"
    yield "| --- | --- |"
    for name in [*paths, *(name for name in bases if name not in paths and group == "weight_sync")]:
        target = _target(bases[name]) if name in bases else None
        refused = group == "weight_sync" and not getattr(target, "collectors", True)
        said = _comment(paths[name]) if name in paths else _summary(target)
        yield f"| `{name}` | {said}{' For programs of yours, not for `train.py`.' if refused else ''} |"
    yield ""
    for path in paths.values():
        yield from _file(path)


def _comment(path: Path) -> str:
    """Return the comment at the head of a file of ``conf/``, as one paragraph."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if "@package" not in line:
            lines.append(line.lstrip("# "))
    return _cell(" ".join(lines))


def _file(path: Path) -> Iterator[str]:
    yield f'??? note "{path.relative_to(ROOT)}"'
    yield "    ```yaml"
    yield from (f"    {line}" for line in path.read_text(encoding="utf-8").splitlines())
    yield "    ```"
    yield ""


def _target(node: Any) -> Any:
    """Return the class or function that Hydra calls with a config; None where there is none."""
    config = node if isinstance(node, DictConfig) else OmegaConf.structured(node)
    path = OmegaConf.select(config, "_target_")
    return None if path is None else get_object(path)


def _summary(documented: Any) -> str:
    """Return the first paragraph of a docstring, on one line."""
    return _cell((inspect.getdoc(documented) or "").split("\n\n")[0])


def _settings(group: str, node: Any, path: Path, skip: Collection[Any] = ()) -> Iterator[str]:
    """Yield a config's table: name, type, default, and what its comment, docstring, or that of its target, says.

    ``path``: the file of the option in ``conf/``; its values are the defaults. ``skip``: names that are left out.
    """
    config = node if isinstance(node, DictConfig) else OmegaConf.structured(node)
    given = OmegaConf.load(path) if path.is_file() else OmegaConf.create()
    assert isinstance(given, DictConfig)
    names = [str(name) for name in config if not str(name).startswith("_") and name not in skip]
    target, kind = _target(node), OmegaConf.get_type(config)
    if target is not None:
        yield f"Calls `{OmegaConf.select(config, '_target_')}`. {_summary(target)}"
        yield ""
    if not names:
        return
    comments = _COMMENT.findall(path.read_text(encoding="utf-8")) if path.is_file() else []
    said = {name: re.sub(r"docs/(\w+)\.md", r"[\1](\1.md)", _cell(text)) for name, text in comments}
    said |= {**_arguments(target), **_arguments(_seen(kind)), **_arguments(kind)}
    types = {field.name: field.type for field in fields(kind)} if kind not in (None, dict) else {}
    yield "| setting | type | default | |"
    yield "| --- | --- | --- | --- |"
    for name in names:
        source = given if name in given else config
        value = "must be given" if OmegaConf.is_missing(source, name) else f"`{_plain(source, name)}`"
        yield f"| `{group}{'.' if group else ''}{name}` | `{_type(types.get(name))}` | {value} | {said.get(name, '')} |"
    yield ""


def _plain(config: DictConfig, name: str) -> str:
    """Return a default as YAML has it, on one line."""
    value = OmegaConf.to_container(config, resolve=False)
    assert isinstance(value, dict)
    return _cell(yaml.safe_dump(value[name], default_flow_style=True).removesuffix("...\n"))


def _type(annotation: Any) -> str:
    shown = annotation.__name__ if isinstance(annotation, type) else str(annotation or "Any")
    return shown.replace("typing.", "").replace(" | ", " or ")


def _seen(config: Any) -> Any:
    """Return the function that the docstring of a config refers to (see ``package.function``); None if to none."""
    found = re.search(r"[Ss]ee ``([\w.]+\.\w+)``", getattr(config, "__doc__", None) or "")
    return get_object(found[1]) if found else None


def _cell(text: str) -> str:
    """Return text for a cell of a table: one line, without bars; with code as Markdown has it, not as Sphinx."""
    return re.sub(r":\w+:(?=`)", "", " ".join(text.split()).replace("|", "\\|").replace("``", "`"))


def _arguments(documented: Any) -> dict[str, str]:
    """Return ``{name: cell}`` of the sections Args and Attributes of a docstring, and of those of base classes.

    Where the text begins with "see ``Name``" or "as in ``Name``", a public name of ``wsync``, the one there is put in.
    """
    found: dict[str, str] = {}
    for one in inspect.getmro(documented) if inspect.isclass(documented) else [documented]:
        made_by = one.__dict__.get("__init__") if inspect.isclass(one) else None
        for documented_here in (one, made_by):
            for _, body in _SECTION.findall(inspect.cleandoc(getattr(documented_here, "__doc__", None) or "") + "\n"):
                for names, text in _ENTRY.findall(body):
                    for name in names.split(","):
                        found.setdefault(name.strip(), _cell(text))
    for name, text in found.items():
        if (other := re.fullmatch(r"(?:see|as in) `(\w+)`[.;](.*)", text)) and other[1] in wsync.__all__:
            told = _arguments(getattr(wsync, other[1])).get(name)
            found[name] = text if told is None else told + other[2]
    return found
