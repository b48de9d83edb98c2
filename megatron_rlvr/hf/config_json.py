"""config.json of a Hugging Face directory, with refusals that name the file, the key and the value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_rlvr.types import UserError


class ConfigJson:
    """The JSON object in `path`; null counts as absent. UserError when the file is missing or broken."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values = _read_json_object(path)

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def require(self, *keys: str) -> None:
        """Refuse the file unless it has all `keys`."""
        for key in keys:
            if self.get(key) is None:
                raise UserError(f"{self.path} has no {key}; copy it again from the model's source.")

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer; `default` where the key is absent."""
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"{self.path}: {key} is {value!r}; it must be a positive integer.")
        return value

    def boolean(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise UserError(f"{self.path}: {key} is {value!r}; it must be true or false.")
        return value

    def refuse(self, key: str, why: str) -> UserError:
        """The error to raise when the value of `key` cannot be served."""
        return UserError(f"{self.path}: {key} {self.values.get(key)!r} is not supported: {why}.")


def _read_json_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"{path} does not exist; model.path must be a Hugging Face directory with a config.json.")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path} is not valid JSON ({error}); copy it again from the model's source.") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} holds a {type(values).__name__}, not a JSON object; copy it again.")
    return values
