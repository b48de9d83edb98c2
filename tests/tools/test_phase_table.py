"""The table of phases against times that are known."""

from __future__ import annotations

import gzip
import json

import pytest
import torch

from megatron_rlvr.ranges import MegatronRanges, phase_range
from tools.phase_table import main, read_table, trace_table


def test_shares_of_a_run_are_of_the_wall_time(tmp_path, capsys):
    rows = [
        {"step": 0, "timing_s/testing": 1.0},
        {"step": 1, "timing_s/step": 10.0, "timing_s/gen": 6.0, "timing_s/update_actor": 2.0},
        {"step": 2, "timing_s/step": 10.0, "timing_s/update_actor": 4.0, "critic/score/mean": 0.5},
        {"step": 2, "timing_s/testing": 7.0},  # behind the last update: no wall time holds it
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = read_table(tmp_path)
    assert table.phases == {"testing": [1.0], "gen": [6.0], "update_actor": [2.0, 4.0]} and table.total == 20
    assert table.idle == {"outside all phases": pytest.approx(7 / 20)}
    assert main([str(tmp_path)]) == 0
    printed = capsys.readouterr().out.splitlines()
    update = next(line.split() for line in printed if line.startswith("update_actor"))
    assert update == ["update_actor", "2", "3.0000", "3.0000", "4.0000", "30.0%"]
    assert printed[-1] == "idle (outside all phases): 35.0%"


def _event(cat, name, start, duration):
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": duration}


def test_idle_of_a_gpu_is_the_time_without_kernels():
    events = [
        _event("user_annotation", "gen", 0, 60e6),
        _event("user_annotation", "sample", 10e6, 20e6),  # inside gen: covers nothing more
        _event("kernel", "a", 0, 30e6),
        _event("kernel", "b", 20e6, 30e6),  # overlaps a
        _event("gpu_memcpy", "c", 90e6, 10e6),
        {"ph": "M", "name": "process_name"},
    ]
    table = trace_table(events)
    assert table.total == 100 and table.phases == {"gen": [60.0], "sample": [20.0]}
    assert table.idle == {
        "outside all ranges": pytest.approx(0.4),
        "GPU without a kernel or copy": pytest.approx(0.4),
    }


def test_a_torch_trace_on_the_cpu_holds_the_ranges_of_phases_and_of_megatron(tmp_path):
    timers = MegatronRanges()
    with torch.profiler.profile() as profile:
        with phase_range("update_actor"):
            for _ in range(3):
                timers("forward-compute", log_level=2).start()
                torch.ones(64, 64) @ torch.ones(64, 64)
                timers("forward-compute").stop()
        with phase_range("refresh"):
            torch.zeros(10)
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    (tmp_path / "trace.json.gz").write_bytes(gzip.compress((tmp_path / "trace.json").read_bytes()))
    table = read_table(tmp_path / "trace.json.gz")
    assert {name: len(seconds) for name, seconds in table.phases.items()} == {
        "update_actor": 1,
        "forward-compute": 3,
        "refresh": 1,
    }
    assert 0 < sum(table.phases["forward-compute"]) <= sum(table.phases["update_actor"]) <= table.total
    assert table == read_table(tmp_path / "trace.json")


@pytest.mark.parametrize("content", ["", "{}", '{"traceEvents": []}', '[{"ph": "X", "name": "a"}]'])
def test_a_file_without_times_is_named(tmp_path, capsys, content):
    path = tmp_path / "trace.json"
    path.write_text(content)
    assert main([str(path)]) == 2
    assert str(path) in capsys.readouterr().err
    assert main([str(tmp_path / "nowhere")]) == 2
