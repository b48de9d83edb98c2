"""What is wrong with a config, in one sentence: the key, its value, what is allowed, the nearest known name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo


def _section(field: FieldInfo) -> type[BaseModel] | None:
    for candidate in (field.annotation, *get_args(field.annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def known_keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key below `section`, sections included, in the order of the tree."""
    for name, field in section.model_fields.items():
        yield prefix + name
        below = _section(field)
        if below is not None:
            yield from known_keys(below, f"{prefix}{name}.")


def nearest_key(key: str, root: type[BaseModel]) -> str | None:
    """The known dotted key that `key` meant, if any: a sibling spelled alike, or the same name elsewhere."""
    keys = list(known_keys(root))
    parent, _, name = key.rpartition(".")
    siblings = [k for k in keys if k.rpartition(".")[0] == parent]
    near = difflib.get_close_matches(name, [k.rpartition(".")[2] for k in siblings], n=1, cutoff=0.6)
    if near:
        return f"{parent}.{near[0]}" if parent else near[0]
    same = [k for k in keys if k.rpartition(".")[2] == name]
    if same or siblings:  # a misspelt name in a known section: a far-fetched guess would only mislead
        return same[0] if same else None
    return next(iter(difflib.get_close_matches(key, keys, n=1, cutoff=0.6)), None)


def _field(path: Iterable[str | int], root: type[BaseModel]) -> FieldInfo | None:
    section: type[BaseModel] | None = root
    field: FieldInfo | None = None
    for name in path:
        if section is None or name not in section.model_fields:
            return field
        field = section.model_fields[str(name)]
        section = _section(field)
    return field


def _allowed(error: Any) -> str:
    message = str(error["msg"]).removeprefix("Value error, ")
    for start in ("Input should be ", "Input should "):
        if message.startswith(start):
            rest = message.removeprefix(start)
            return f"it must be {rest}" if start.endswith("be ") else f"it must {rest}"
    return message[0].lower() + message[1:]


def _unknown(key: str, root: type[BaseModel]) -> str:
    near = nearest_key(key, root)
    if near is not None:
        return f"unknown config key {key}; the nearest known key is {near}"
    parent = key.rpartition(".")[0]
    known = [k for k in known_keys(root) if k.rpartition(".")[0] == parent]
    known_here = f"{parent} knows" if parent else "known sections and keys are"
    return f"unknown config key {key}; {known_here} {', '.join(known)}"


def _missing(key: str, error: Any, field: FieldInfo | None) -> str:
    if isinstance(error["loc"][-1], int):
        return f"config key {key.rpartition('.')[0]} is {error['input']!r}; it has too few values"
    section = _section(field) if field is not None else None
    needed = [f"{key}.{name}" for name, f in section.model_fields.items() if f.is_required()] if section else [key]
    meaning = f" ({field.description})" if field is not None and field.description else ""
    return (
        f"config key {needed[0]}{meaning} is missing; set it in the YAML file or on the command line as {needed[0]}=..."
    )


def _key(error: Any) -> str:
    """The dotted key of an error; pydantic names the branch of a union behind it, which no user wrote."""
    parts = [str(part) for part in error["loc"]]
    return ".".join(part for part in parts if part.isidentifier() or part.isdecimal())


def _sentence(error: Any, root: type[BaseModel], alternatives: Iterable[Any]) -> str:
    key = _key(error)
    field = _field(error["loc"], root)
    if error["type"] == "extra_forbidden":
        return _unknown(key, root)
    if error["type"] == "missing":
        return _missing(key, error, field)
    if error["type"] == "model_type":
        section = _section(field) if field is not None else None
        names = ", ".join(section.model_fields) if section is not None else "its keys"
        return f"config section {key} is {error['input']!r}; it must be a mapping with {names}"
    meaning = f" ({field.description})" if field is not None and field.description else ""
    allowed = dict.fromkeys(_allowed(other) for other in alternatives)
    return f"config key {key} is {error['input']!r}; {' or '.join(allowed).replace(' or it must', ' or')}{meaning}"


def explain(errors: ValidationError, root: type[BaseModel]) -> str:
    """One sentence on the first fault, unknown keys before all others; how many more faults there are is added."""
    details = sorted(errors.errors(), key=lambda e: e["type"] != "extra_forbidden")
    alternatives = [other for other in details if _key(other) == _key(details[0])]
    others = len({_key(other) for other in details}) - 1
    more = f" (and {others} more in the config)" if others else ""
    return _sentence(details[0], root, alternatives) + more
