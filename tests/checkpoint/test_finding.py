"""Which checkpoint a run goes on from, and which it refuses."""

from __future__ import annotations

import json

import pytest

from megatron_rlvr.checkpoint.continuing import cut_files
from megatron_rlvr.checkpoint.finding import continues_in_place, find_checkpoint
from megatron_rlvr.checkpoint.manifest import MANIFEST
from megatron_rlvr.config.run_dir import RunFiles
from megatron_rlvr.types import UserError
from tests.checkpoint.made import make_checkpoint, run_config


@pytest.fixture
def folder(tmp_path):
    """A run with checkpoints of updates 2, 4 and 10."""
    for step in (2, 4, 10):
        make_checkpoint(tmp_path / "run/checkpoints", step, run_config(tmp_path / "run"))
    return tmp_path / "run/checkpoints"


def config(folder, resume="auto", **sections):
    return run_config(folder.parent, checkpoint={"resume": str(resume)}, **sections)


def test_auto_takes_the_newest_that_is_whole(folder):
    told = []
    assert find_checkpoint(config(folder), told.append) == folder / "step_000010"
    assert not told
    (folder / "step_000010/tensors/__0_0.distcp").write_bytes(b"short")
    assert find_checkpoint(config(folder), told.append) == folder / "step_000004"
    assert len(told) == 1 and "__0_0.distcp" in told[0] and "5 bytes found, 70 written" in told[0]
    (folder / "step_000004" / MANIFEST).unlink()  # as a kill before the manifest leaves it
    assert find_checkpoint(config(folder)) == folder / "step_000002"


def test_a_changed_file_of_the_same_size_is_seen(folder):
    (folder / "step_000010/tensors/__0_0.distcp").write_bytes(b"WEIGHTS" * 10)
    assert find_checkpoint(config(folder)) == folder / "step_000004"


def test_never_and_an_empty_run_dir_start_from_the_beginning(folder, tmp_path):
    assert find_checkpoint(config(folder, "never")) is None
    assert find_checkpoint(run_config(tmp_path / "other", checkpoint={"resume": "auto"})) is None


def test_a_path_into_another_run_starts_a_new_one_and_the_newest_own_one_goes_on_in_place(folder, tmp_path):
    other = run_config(tmp_path / "other", checkpoint={"resume": str(folder / "step_000004")})
    assert find_checkpoint(other) == folder / "step_000004"
    assert not continues_in_place(other, folder / "step_000004")
    newest = config(folder, folder / "step_000010")
    assert continues_in_place(newest, find_checkpoint(newest))


@pytest.mark.parametrize(
    ("resume", "words"),
    [("step_000004", "newer ones"), ("step_000003", "no finished checkpoint"), ("weights", "weights alone")],
)
def test_other_paths_are_refused(folder, resume, words):
    make_checkpoint(folder, 7, config(folder), kind="model").rename(folder / "weights")
    with pytest.raises(UserError, match=words):
        find_checkpoint(config(folder, folder / resume))


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"seed": 3}, "seed was 0 in the checkpoint and is now 3"),
        ({"loss": {"hyperparameters": {"alpha_pos": 0.5}}}, "loss.hyperparameters"),
        ({"actor": {"dtype": "float32"}}, "actor.dtype"),
        ({"trainer": {"updates": 9}}, "trainer.updates is 9, but the checkpoint has done 10"),
    ],
)
def test_settings_of_another_run_are_refused_by_name(folder, sections, words):
    with pytest.raises(UserError, match=words):
        find_checkpoint(config(folder, **sections))


def test_layout_length_and_logging_may_change(folder):
    changed = {
        "actor": {"tensor_parallel": 2, "data_parallel": 4, "micro_batch_tokens": 99, "distributed_optimizer": True},
        "trainer": {"updates": 5000},
        "logging": {"wandb": True},
        "launch": {"threads": 3},
    }
    assert find_checkpoint(config(folder, **changed)) == folder / "step_000010"


def test_a_key_that_the_checkpoints_release_did_not_know_is_no_difference(folder):
    path = folder / "step_000010" / MANIFEST
    content = json.loads(path.read_text())
    del content["details"]["config"]["optimizer"]["eps"]
    path.write_text(json.dumps(content))
    assert find_checkpoint(config(folder)) == folder / "step_000010"


ROWS = [b'{"step": 0}\n', b'{"step": 1}\n', b'{"step": 2}\n', b'{"step": 2, "val": 1}\n', b'{"step": 3}\n', b'{"st']


@pytest.mark.parametrize("position", [36, 10_000])  # the place in the file; a file that is not the one it was
def test_rows_after_the_checkpoint_are_cut(tmp_path, position):
    files = RunFiles(tmp_path)
    files.metrics.write_bytes(b"".join(ROWS))
    files.rollouts.mkdir()
    for step in (2, 3):
        (files.rollouts / f"step_{step:06d}.jsonl").touch()
    cut_files(files, 2, position)
    kept = ROWS[:3] if position == 36 else ROWS[:4]  # update 2 was evaluated after the checkpoint was taken
    assert files.metrics.read_bytes() == b"".join(kept)
    assert [path.name for path in files.rollouts.iterdir()] == ["step_000002.jsonl"]
