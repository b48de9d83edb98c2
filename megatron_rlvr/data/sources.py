"""Rows of problem sets from wherever they are: JSON lines, JSON, parquet, a folder of these, or the hub."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from megatron_rlvr.data.schemas import SCHEMAS, Schema
from megatron_rlvr.files import first_line, read_json_lines
from megatron_rlvr.types import UserError

HUB = "hub:"
SUFFIXES = (".parquet", ".jsonl", ".json")
Row = tuple[str, str, dict[str, Any]]  # id, where it stands, columns


def read_rows(source: str | Path, columns: Collection[str]) -> Iterator[Row]:
    """(id, "file:line", columns) of every row of a file, a folder's files in order of name, or "hub:<published set>".

    columns   those that parquet files are asked for, as far as they have them; JSON gives all

    The id is "<file stem>:<line>", lines of parquet files counting from 1. Raises UserError for what cannot be read.
    """
    for file in source_files(source):
        if file.suffix == ".parquet":
            yield from _parquet(file, columns)
        elif file.suffix == ".json" and _is_array(file):
            yield from _array(file)
        else:
            for line, where, row in read_json_lines(file):
                yield f"{file.stem}:{line}", where, row


def source_files(source: str | Path) -> list[Path]:
    """The files of a source; a hub set is downloaded into the hub's cache. Raises UserError where there are none."""
    if str(source).startswith(HUB):
        return _files_below(download(published(str(source).removeprefix(HUB))))
    path = Path(source)
    return _files_below(path) if path.is_dir() else [path]


def published(name: str) -> Schema:
    """The published set of that name. Raises UserError for another name."""
    found = next((schema for schema in SCHEMAS if schema.name == name), None)
    if found is None:
        names = [schema.name for schema in SCHEMAS]
        near = difflib.get_close_matches(name, names, n=1) or [", ".join(names)]
        raise UserError(f"{HUB}{name} is not a published set that is known here; use {HUB}{near[0]}, or name a file.")
    return found


def download(schema: Schema, fetch: Callable[..., str] | None = None) -> Path:
    """The local folder with the set's files, from the hub or its cache.

    fetch   `huggingface_hub.snapshot_download`, or what takes its place

    Raises UserError where huggingface_hub is missing, or has neither network nor cached files.
    """
    remedy = f"copy {schema.files} of {schema.repository} to this machine and name the file or folder instead"
    if fetch is None:
        try:
            from huggingface_hub import snapshot_download as fetch
        except ImportError as error:
            raise UserError(
                f"{HUB}{schema.name} needs huggingface_hub, which is not installed; install it, or {remedy}."
            ) from error
    assert fetch is not None
    try:
        folder = fetch(schema.repository, repo_type="dataset", allow_patterns=[schema.files])
    except Exception as error:  # the hub's client raises errors of three libraries
        raise UserError(f"{HUB}{schema.name} cannot be downloaded ({first_line(error)}); {remedy}.") from error
    return Path(folder)


def _files_below(folder: Path) -> list[Path]:
    files = sorted(
        file
        for file in folder.rglob("*")
        if file.suffix in SUFFIXES and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    )
    if not files:
        raise UserError(f"{folder} holds no {', '.join(SUFFIXES)} file; put the problems there or name another folder.")
    return files


def _parquet(file: Path, columns: Collection[str]) -> Iterator[Row]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise UserError(f"{file} needs pyarrow, which is not installed; install it or convert to JSONL.") from error
    try:
        with parquet.ParquetFile(file) as content:
            wanted = [name for name in content.schema_arrow.names if name in columns]
            line = 0
            for batch in content.iter_batches(columns=wanted):
                for row in batch.to_pylist():
                    line += 1
                    yield f"{file.stem}:{line}", f"{file}:{line}", row
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(
            f"{file} is not a parquet file that can be read ({first_line(error)}); copy it again."
        ) from error


def _is_array(file: Path) -> bool:
    try:
        with open(file, encoding="utf-8-sig") as text:
            return text.read(1024).lstrip().startswith("[")
    except (OSError, UnicodeDecodeError):
        return False  # the reader of lines says what is wrong


def _array(file: Path) -> Iterator[Row]:
    try:
        rows = json.loads(file.read_text(encoding="utf-8-sig"), parse_int=str, parse_float=str)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not JSON ({first_line(error)}); correct it or write one object a line.") from error
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise UserError(f"{file}: element {number} is not a JSON object; write it as {{...}} with a value a key.")
        yield f"{file.stem}:{number}", f"{file}:{number}", row
