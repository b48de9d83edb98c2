"""What a journal holds after every way of being cut off, and which files it leaves alone."""

from __future__ import annotations

import json

import pytest

from megatron_rlvr.evaluation.journal import Journal, read_journal
from megatron_rlvr.files import write_whole
from megatron_rlvr.types import UserError

SETTINGS = {"seed": 1, "temperature": 0.6, "range": (0.25, 0.5)}
ROWS = [{"first": n, "successes": [n, 2]} for n in range(3)]


def write(path):
    with Journal(path, SETTINGS) as journal:
        for row in ROWS:
            journal.append(row)
    return path.read_bytes()


def test_every_cut_leaves_the_whole_calls_before_it(tmp_path):
    path = tmp_path / "deep" / "state.jsonl"
    content = write(path)
    for size in [*range(0, len(content), 5), len(content) - 1, len(content)]:
        path.write_bytes(content[:size])
        whole = max(content[:size].count(b"\n") - 1, 0)
        with Journal(path, SETTINGS) as journal:
            assert journal.rows == ROWS[:whole]
            for row in ROWS[whole:]:
                journal.append(row)
        assert path.read_bytes() == content
    path.write_bytes(content + b"\x00\x00\n")  # blocks that a power failure left unwritten
    assert read_journal(path) == ({**SETTINGS, "range": [0.25, 0.5]}, ROWS)
    with Journal(path, SETTINGS) as journal:
        assert journal.rows == ROWS
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("change", "named"),
    [({"temperature": 1.0}, "temperature 0.6, but it is now 1.0"), ({"new": 1}, "new null, but it is now 1")],
)
def test_other_settings_are_refused_by_name(tmp_path, change, named):
    content = write(tmp_path / "s")
    with pytest.raises(UserError, match=named):
        Journal(tmp_path / "s", {**SETTINGS, **change})
    assert (tmp_path / "s").read_bytes() == content


def test_foreign_and_broken_files_stay_as_they_are(tmp_path):
    path = tmp_path / "s"
    for content, message in (
        (b"my notes", "not written by this tool"),
        (b'{"problem": "1+1"}\n', "not written by this tool"),
        (json.dumps({"settings": SETTINGS}).encode() + b"\n{broken\n{}\n", ":2 is not JSON"),
    ):
        path.write_bytes(content)
        with pytest.raises(UserError, match=message):
            Journal(path, SETTINGS)
        assert path.read_bytes() == content
    with pytest.raises(UserError, match="cannot be written"):
        Journal(tmp_path, SETTINGS)
    with pytest.raises(UserError, match="cannot be read"):
        read_journal(tmp_path / "none")


def test_one_writer_at_a_time(tmp_path):
    with Journal(tmp_path / "s", SETTINGS), pytest.raises(UserError, match="another process"):
        Journal(tmp_path / "s", SETTINGS)
    Journal(tmp_path / "s", SETTINGS).__exit__(None, None, None)


def test_write_whole_leaves_nothing_beside(tmp_path):
    write_whole(tmp_path / "a", b"1")
    write_whole(tmp_path / "a", b"22\n")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("a", b"22\n")]
