"""Killed at any step of publishing a checkpoint, the run has the old one or the new one, whole."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from megatron_rlvr.checkpoint import training, writing
from megatron_rlvr.checkpoint.finding import newest_valid, step_directory
from megatron_rlvr.checkpoint.manifest import MANIFEST, TENSORS, read_manifest
from megatron_rlvr.checkpoint.model_weights import load_model_weights
from megatron_rlvr.checkpoint.training import Checkpoints
from megatron_rlvr.types import UserError
from tests.checkpoint.made import make_checkpoint, run_config


class Killed(BaseException):
    pass


class _Steps:
    """Counts the changes that are made on the disk; raises at the one numbered `last`."""

    def __init__(self, last: int) -> None:
        self.left = last

    def watch(self, monkeypatch, owner, name) -> None:
        real = getattr(owner, name)

        def step(*arguments, **options):
            self.left -= 1
            if self.left < 0:
                raise Killed
            return real(*arguments, **options)

        monkeypatch.setattr(owner, name, step)


@pytest.fixture
def publish(one_rank, tmp_path, monkeypatch):
    """Publishes update 6 beside checkpoints of updates 2 and 4, keeping two."""
    config = run_config(tmp_path, checkpoint={"keep": 2})
    monkeypatch.setattr(writing, "stored_tensors", lambda directory: {})
    checkpoints = Checkpoints(config, actor=None)

    def write() -> None:
        partial = writing.open_partial(step_directory(checkpoints.folder, 6))
        (partial / TENSORS / "__0_0.distcp").write_bytes(b"new")
        checkpoints._publish(partial, 6, {"config": {}})

    for step in (2, 4):
        make_checkpoint(checkpoints.folder, step, config)
    return checkpoints.folder, write


def test_a_kill_anywhere_leaves_a_whole_checkpoint(publish, monkeypatch, tmp_path):
    folder, write = publish
    before = tmp_path / "before"
    shutil.copytree(folder, before)
    found = []
    for last in range(100):
        with monkeypatch.context() as patched:
            steps = _Steps(last)
            for owner, name in ((Path, "rename"), (os, "fsync"), (os, "replace"), (os, "rmdir"), (os, "unlink")):
                steps.watch(patched, owner, name)
            try:
                write()
            except Killed:
                pass
            else:
                break
        newest = newest_valid(folder)
        assert newest is not None
        found.append(newest.name)
        shutil.rmtree(folder)
        shutil.copytree(before, folder)
    assert len(found) >= 8 and set(found) == {"step_000004", "step_000006"}
    assert found == sorted(found), "once the new one is there it stays"
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step_000004", "step_000006"]
    assert (folder / "latest").read_text() == "step_000006\n"


def test_the_leftovers_of_a_kill_do_not_disturb_the_next_write(publish):
    folder, write = publish
    (folder / ".step_000006.partial" / TENSORS).mkdir(parents=True)
    (folder / ".step_000006.partial" / TENSORS / "old").touch()
    (folder / "step_000006").mkdir()  # as no kill of ours leaves it, but a copy might
    (folder / ".step_000003.removed-77").mkdir()
    writing.sweep(folder)
    assert not list(folder.glob(".*"))
    write()
    assert not (folder / "step_000006" / TENSORS / "old").exists()
    assert newest_valid(folder) == folder / "step_000006"


def test_a_directory_without_our_manifest_is_not_opened(tmp_path):
    (tmp_path / TENSORS).mkdir()
    (tmp_path / TENSORS / ".metadata").write_bytes(b"a pickle of someone else's")
    with pytest.raises(UserError, match="no finished checkpoint of this package"):
        load_model_weights(tmp_path, [])


def test_a_changed_index_is_not_opened(tmp_path):
    path = make_checkpoint(tmp_path, 2, run_config(tmp_path), kind="model")
    (path / TENSORS / "__0_0.distcp").write_bytes(b"another bytes!")
    with pytest.raises(UserError, match=r"__0_0.distcp is not what the checkpoint's manifest says"):
        load_model_weights(path, [])


def test_a_weight_that_the_model_has_no_place_for_is_named(one_rank, tmp_path):
    path = make_checkpoint(tmp_path, 2, run_config(tmp_path), kind="model")
    with pytest.raises(UserError, match=r"has decoder\.weight .*belongs to another model"):
        load_model_weights(path, [])


@pytest.mark.parametrize(("key", "value"), [("files", 3), ("files", {"a": 5}), ("details", []), ("step", "x")])
def test_a_manifest_of_another_form_is_refused(tmp_path, key, value):
    file = make_checkpoint(tmp_path, 2, run_config(tmp_path)) / MANIFEST
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(UserError, match=r"manifest\.json is damaged"):
        read_manifest(file.parent)


@pytest.mark.parametrize(
    ("interval", "last", "version", "due"),
    [(4, None, 3, False), (4, None, 6, True), (4, 6, 7, False), (4, 6, 9, True), (None, None, 100, False)],
)
def test_a_checkpoint_is_due_once_a_multiple_of_the_interval_is_passed(tmp_path, interval, last, version, due):
    class Learner:
        pass

    learner = Learner()
    learner.version = version
    checkpoints = training.Checkpoints(run_config(tmp_path, checkpoint={"interval": interval}), learner)
    checkpoints.last_step = last
    assert checkpoints.due() is due
