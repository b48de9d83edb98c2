"""Results of long sampling on disk: kept line by line as they come in, so that a killed job loses one call at most."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from megatron_rlvr.types import UserError

_START = b'{"settings": '


class Journal:
    """A JSONL file: the settings that its rows were made under, then one row per finished call. A context.

    Opening an existing file reads its rows back and goes on behind them. A last line that a kill or a power failure
    left unfinished is cut off, and with it the whole call. `append` returns when the row is on the disk. A journal that
    is left without a row is removed.

    Raises UserError for a file of other settings (naming the first that differs), one that is no journal, one with a
    broken line before the last, one that cannot be written, and one that another process has open.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a+b")  # noqa: SIM115 - closed by the context
        except OSError as error:
            raise UserError(f"{path} cannot be written ({error.strerror}); name another output") from None
        try:
            _lock(self._file.fileno(), path)
            self.rows: list[dict[str, Any]] = self._resume(dict(settings))
        except BaseException:
            self._file.close()
            raise

    def _resume(self, settings: dict[str, Any]) -> list[dict[str, Any]]:
        self._file.seek(0)
        lines, size = _parse(self._file.read(), self.path)
        self._file.truncate(size)
        if not lines:
            self._write({"settings": settings})
            return []
        _check_settings(lines[0]["settings"], json.loads(json.dumps(settings)), self.path)
        return lines[1:]

    def append(self, row: dict[str, Any]) -> None:
        """Add one finished call and wait until it is on the disk."""
        self._write(row)
        self.rows.append(row)

    def _write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.rows:
            self.path.unlink(missing_ok=True)
        self._file.close()


def read_journal(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Settings and rows of a journal, which is left as it is. Raises UserError where there is none, or a broken one."""
    try:
        lines, _ = _parse(path.read_bytes(), path)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); sample first") from None
    if not lines:
        raise UserError(f"{path} holds no samples; sample first")
    return lines[0]["settings"], lines[1:]


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{path} is being written by another process; wait for it or name another output") from None


def _parse(content: bytes, path: Path) -> tuple[list[dict[str, Any]], int]:
    """The lines as objects, and how many bytes of `content` they take; a torn last line is not among them."""
    if not content.startswith(_START[: len(content)]):
        raise UserError(f"{path} was not written by this tool; name another output or move the file away")
    whole = content.splitlines(keepends=True)
    lines: list[dict[str, Any]] = []
    size = 0
    for number, line in enumerate(whole, 1):
        try:
            row = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            row = None
        if row is None:
            if number < len(whole):
                raise UserError(f"{path}:{number} is not JSON; remove the file and sample again")
            break
        lines.append(row)
        size += len(line)
    return lines, size


def _check_settings(kept: dict[str, Any], wanted: dict[str, Any], path: Path) -> None:
    for key in [*wanted, *(key for key in kept if key not in wanted)]:
        before, now = json.dumps(kept.get(key)), json.dumps(wanted.get(key))
        if before != now:
            raise UserError(
                f"{path} was sampled with {key} {before}, but it is now {now}; "
                "go on with the same settings, name another output or remove the file"
            )
