"""Which updates and ranks a profiler sees."""

from __future__ import annotations

import torch

from megatron_rlvr.config.tree import ProfileConfig
from megatron_rlvr.observability.profiler import Profiler
from megatron_rlvr.ranges import phase_range
from tools.phase_table import read_table


def _updates(profiler: Profiler, first: int, last: int) -> None:
    """What a run does: told where it stands, then a rollout batch and an update, each in a range of its number."""
    profiler.advance(first)
    for update in range(first + 1, last + 1):
        with phase_range(f"update {update}"):
            torch.zeros(1)
        profiler.advance(update)
    profiler.close()


def test_a_trace_holds_the_updates_of_its_window(tmp_path):
    _updates(Profiler(ProfileConfig(tool="torch", steps=(2, 3), ranks=[1]), tmp_path / "profile", 1), 0, 5)
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["rank1_steps2-3.json"]
    assert set(read_table(tmp_path / "profile/rank1_steps2-3.json").phases) == {"update 2", "update 3"}


def test_a_run_that_starts_inside_the_window_or_ends_there_keeps_what_it_saw(tmp_path):
    _updates(Profiler(ProfileConfig(tool="torch", steps=(2, 9)), tmp_path, 0), 3, 5)
    assert set(read_table(tmp_path / "rank0_steps2-9.json").phases) == {"update 4", "update 5"}


def test_other_ranks_and_finished_windows_write_nothing(tmp_path):
    _updates(Profiler(ProfileConfig(tool="torch", steps=(2, 3), ranks=[1]), tmp_path, 0), 0, 5)
    _updates(Profiler(ProfileConfig(tool="torch", steps=(2, 3)), tmp_path, 0), 3, 5)
    _updates(Profiler(ProfileConfig(), tmp_path, 0), 0, 5)
    assert not list(tmp_path.iterdir())


def test_a_failed_run_writes_no_half_window(tmp_path):
    profiler = Profiler(ProfileConfig(tool="torch", steps=(1, 3)), tmp_path, 0)
    profiler.advance(0)
    profiler.close(RuntimeError("broken"))
    assert not list(tmp_path.iterdir())
    torch.profiler.profile().__enter__().__exit__(None, None, None)  # another one can be opened


def test_a_cpu_says_that_it_has_no_memory_snapshots(tmp_path, capsys):
    _updates(Profiler(ProfileConfig(memory=True, steps=(1, 1)), tmp_path, 0), 0, 2)
    assert "profile.memory does nothing here" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
