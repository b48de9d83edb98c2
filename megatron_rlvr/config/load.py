"""YAML and dotted overrides in, one typed tree out; the resolved tree goes back to YAML and loads to an equal one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from pydantic import BaseModel, ValidationError

from megatron_rlvr.config.messages import explain
from megatron_rlvr.config.tree import RunConfig
from megatron_rlvr.files import write_whole
from megatron_rlvr.types import UserError

Tree = TypeVar("Tree", bound=BaseModel)

# The scalars of YAML 1.2's core schema. PyYAML follows 1.1, where 1e-6 is text, `off` is False and 12:30 is a number.
_CORE_SCALARS: tuple[tuple[str, str, str], ...] = (
    ("tag:yaml.org,2002:null", r"^(?:~|null|Null|NULL|)$", "~nN\0"),
    ("tag:yaml.org,2002:bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("tag:yaml.org,2002:int", r"^[-+]?(?:0|[1-9][0-9_]*)$", "-+0123456789"),
    (
        "tag:yaml.org,2002:float",
        r"^(?:[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        "-+0123456789.",
    ),
    ("tag:yaml.org,2002:merge", r"^<<$", "<"),
)


class _Loader(yaml.SafeLoader):
    """Safe loader with YAML 1.2 scalars that refuses a key given twice."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML fills this class attribute

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            line = key_node.start_mark.line + 1
            if key_node.value in seen:
                lines = f"{seen[key_node.value]} and {line}"
                raise UserError(f"key {key_node.value} is given twice, on lines {lines}; remove one of them")
            seen[key_node.value] = line
        return cast(dict[Any, Any], super().construct_mapping(node, deep))


class _Dumper(yaml.SafeDumper):
    """Safe dumper that quotes whatever either version of YAML would not read back as text."""


for _tag, _pattern, _first in _CORE_SCALARS:
    _characters = ["" if c == "\0" else c for c in _first]
    _Loader.add_implicit_resolver(_tag, re.compile(_pattern), _characters)
    _Dumper.add_implicit_resolver(_tag, re.compile(_pattern), _characters)


def parse_yaml(text: str, source: str) -> Any:
    """The value that `text` holds; `source` names it in errors.

    Raises UserError: not YAML, or a key given twice.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or "cannot be read"
        raise UserError(f"{source}{where} is not valid YAML ({problem}); correct it there") from error
    except UserError as error:
        raise UserError(f"{source}: {error}") from None


def read_tree(path: Path) -> dict[str, Any]:
    """The nested dicts of a YAML file. Raises UserError where it is missing, not YAML, or holds no mapping."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"config file {path} does not exist; give the path of a run's YAML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"config file {path} cannot be read ({error}); give the path of a run's YAML file") from None
    tree = parse_yaml(text, f"config file {path}")
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(f"config file {path} holds a {type(tree).__name__}; it must hold sections such as `model:`")
    return tree


def parse_override(text: str) -> tuple[tuple[str, ...], Any]:
    """`section.key=value` as path and YAML-typed value.

    Raises UserError: no `=`, an empty name in the path, or a value that is not YAML.
    """
    dotted, equals, value = text.partition("=")
    path = tuple(dotted.strip().split("."))
    if not equals or not all(path):
        raise UserError(f"override {text!r} is not section.key=value; write for example trainer.updates=100")
    return path, parse_yaml(value, f"override {text!r}")


def _apply(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    here = tree
    for depth, name in enumerate(path[:-1]):
        if here.get(name) is None:
            here[name] = {}
        below = here[name]
        if not isinstance(below, dict):
            parent = ".".join(path[: depth + 1])
            raise UserError(f"override {'.'.join(path)} goes below {parent}, which is {below!r}; set {parent} itself")
        here = below
    here[path[-1]] = value


def _non_text_keys(tree: Any, path: str = "") -> Iterator[str]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            if not isinstance(key, str):
                yield f"{path}{key}"
            yield from _non_text_keys(value, f"{path}{key}.")


def build_config(tree: dict[str, Any]) -> RunConfig:
    """The run of nested dicts: `build_tree` for `RunConfig`."""
    return build_tree(tree, RunConfig)


def build_tree(tree: dict[str, Any], root: type[Tree]) -> Tree:
    """The typed tree of nested dicts, with the strict types of JSON: no text where a number belongs, no 1 for true.

    Raises UserError: unknown key (with the nearest known one), missing key, wrong type or value out of range.
    """
    for name in _non_text_keys(tree):
        raise UserError(f"key {name} is not text; put it in quotes")
    try:
        text = json.dumps(tree)
    except TypeError as error:
        raise UserError(
            f"the config holds a value that is no number, text, list or mapping ({error}); remove it"
        ) from None
    try:
        return root.model_validate_json(text, strict=True)
    except ValidationError as error:
        raise UserError(explain(error, root)) from None


def load_config(yaml_path: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """The run that a YAML file and `section.key=value` overrides describe (later overrides win).

    Relative paths are relative to the current directory and come out absolute.
    Raises UserError: one sentence that names the key, its value and the remedy.
    """
    return build_config(with_overrides(read_tree(Path(yaml_path)), overrides))


def with_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """`tree`, changed in place by `section.key=value` overrides (later ones win). Raises UserError as they do."""
    for text in overrides:
        path, value = parse_override(text)
        _apply(tree, path, value)
    return tree


def dump_config(config: BaseModel) -> str:
    """YAML that `load_config` reads back to an equal tree, every default written out."""
    return cast(str, yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True))


def save_resolved(config: RunConfig, path: Path | str) -> None:
    """Write `dump_config(config)` to `path`, whole or not at all."""
    write_whole(Path(path), dump_config(config).encode())
