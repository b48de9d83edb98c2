"""Files as all rooms treat them: JSON lines read with refusals that name the line, and files that appear whole."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron_rlvr.types import UserError


def read_json_lines(path: Path, number: Callable[[str], Any] = str) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """(line number, "file:line", object) of every line that is not blank.

    number   makes a value of a JSON number's digits as they are written, however many

    Raises UserError naming file, line and remedy for a line that is no JSON object and a file that cannot be read.
    """
    for line, content in _lines(path):
        where = f"{path}:{line}"
        try:
            row = json.loads(content, parse_int=number, parse_float=number)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where} is not JSON ({first_line(error)}); correct or remove the line.") from error
        if not isinstance(row, dict):
            raise UserError(f"{where} is not a JSON object; write it as {{...}} with one value a key.")
        yield line, where, row


def write_whole(path: Path, content: bytes) -> None:
    """Write `path` so that it holds either what it held or all of `content`, whatever happens."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(partial, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


@contextlib.contextmanager
def locked(directory: Path, target: Path) -> Iterator[None]:
    """Hold `directory`, where `target` is being made, against other writers; the kernel lets go however this ends.

    Raises UserError where another process holds it.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UserError(f"{target} is being written by another process; wait for it or choose another name.") from None
    except OSError:  # a file system without locks
        pass
    try:
        yield
    finally:
        os.close(descriptor)


def first_line(error: BaseException) -> str:
    """What an error says in one line; its class where it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            yield from ((line, content) for line, content in enumerate(file, 1) if content.strip())
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error.reason}); convert it to UTF-8 JSONL.") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); name a JSONL file that exists.") from error
