"""What the `plot` command makes of several runs: seeds in one group, a band, and one page that needs no other file."""

from __future__ import annotations

import base64
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_rlvr import cli
from megatron_rlvr.observability.drawing import band
from megatron_rlvr.observability.groups import group_runs, read_run
from megatron_rlvr.observability.page import Section, Table, to_html, to_markdown
from megatron_rlvr.observability.report import plot
from megatron_rlvr.observability.series import points, read_metrics
from megatron_rlvr.types import UserError

PNG = b"\x89PNG\r\n\x1a\n"


def _run(path: Path, seed: int, shift: float = 0.0, **config: Any) -> Path:
    path.mkdir(parents=True)
    tree = {"name": path.name, "seed": seed, "run_dir": str(path), "trainer": {"rollout_reuse": 2}, **config}
    (path / "config.yaml").write_text(yaml.safe_dump(tree))
    rows: list[dict[str, Any]] = [{"step": 0, "val-core/aime24/acc/mean@4": 0.125, "val-core/test/acc/mean@4": 0.5}]
    rows += [{"step": n, "critic/score/mean": n / 10 + shift, "actor/grad_norm": 1.0} for n in range(1, 7)]
    rows[4]["val-core/aime24/acc/mean@4"] = 0.75 + shift
    rows[6]["val-core/aime24/acc/mean@4"] = 0.5
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_runs_are_grouped_by_what_their_configs_say(tmp_path: Path) -> None:
    loss, beta = {"loss": {"name": "respo"}}, {"loss": {"name": "pg"}, "rollout": {"top_p": 0.5}}
    paths = [_run(tmp_path / "a", 0, **loss), _run(tmp_path / "b", 0, **beta), _run(tmp_path / "c", 1, **loss)]
    groups = group_runs([read_run(path) for path in paths])
    assert [(group.label, [run.name for run in group.runs]) for group in groups] == [
        ("respo", ["a", "c"]),
        ("pg", ["b"]),
    ]
    assert groups[0].runs[0].batch == 2
    paths.append(_run(tmp_path / "d", 0, loss={"name": "pg"}, rollout={"top_p": 0.25}))
    assert [g.label for g in group_runs([read_run(p) for p in paths])] == [
        "respo top_p=None",
        "pg top_p=0.5",
        "pg top_p=0.25",
    ]
    (tmp_path / "d" / "config.yaml").unlink()
    assert [group.label for group in group_runs([read_run(path) for path in paths])] == ["a", "b", "d"]


def test_a_band_is_the_mean_and_deviation_where_all_seeds_have_a_value() -> None:
    steps, means, deviations = band([([1, 2, 4], [1.0, 2.0, 4.0]), ([2, 3, 4], [4.0, 9.0, 8.0])])
    assert (steps, means) == ([2, 4], [3.0, 6.0])
    assert deviations == pytest.approx([math.sqrt(2), math.sqrt(8)])
    assert band([([5], [1.0])]) == ([5], [1.0], [0.0])


def test_several_runs_make_one_page_that_needs_no_other_file(tmp_path: Path) -> None:
    runs = [_run(tmp_path / "a", 0, loss={"name": "respo"}), _run(tmp_path / "b", 1, 0.1, loss={"name": "respo"})]
    runs.append(_run(tmp_path / "c", 0, loss={"name": "<pg>"}))
    assert cli.main(["plot", *map(str, runs), "--output", str(tmp_path / "all"), "--ema", "0.2"]) == 0
    pictures = sorted((tmp_path / "all").glob("*.png"))
    assert {path.name for path in pictures} == {
        "training_accuracy.png",
        "held_out_aime24.png",
        "held_out_test.png",
        "grad_norm.png",
    }
    page = (tmp_path / "all" / "report.html").read_text()
    inside = [base64.b64decode(data) for data in re.findall(r'src="data:image/png;base64,([^"]+)"', page)]
    assert sorted(inside) == sorted(path.read_bytes() for path in pictures)
    assert all(picture.startswith(PNG) for picture in inside)
    assert "&lt;pg&gt;" in page and "<pg>" not in page
    assert not re.search(r'(src|href)="(?!data:)', page)
    text = (tmp_path / "all" / "report.md").read_text()
    # late means .675 and .725 by hand: batches at updates 2, 4, 6 with accuracy .575, .675, .775 (and .05 more)
    assert f"| respo | 2 | 0.8 | 0.7 | {0.2 / math.sqrt(12):.4g} | 0.8 | {0.05 / math.sqrt(2):.4g} |" in text
    assert "| respo | aime24 | 0.125 | 0.5 | 0.8 | 4, 4 |" in text and "| <pg> | test | 0.5 | 0.5 | 0.5 | 0 |" in text
    assert "(training_accuracy.png)" in text
    assert "accuracy on aime24" in (tmp_path / "a" / "report.md").read_text()


def test_one_run_gets_its_page_beside_its_report(tmp_path: Path) -> None:
    run = _run(tmp_path / "a", 0)
    written = plot([run])
    assert {run / "report.md", run / "report.html"} <= set(written) and all(path.stat().st_size for path in written)
    assert all(path.is_relative_to(run) for path in written)
    with pytest.raises(UserError, match="--ema is 0"):
        plot([run], alpha=0)
    with pytest.raises(UserError, match="named twice"):
        plot([run, run / ".." / "a"])


def test_pages_escape_what_would_break_them(tmp_path: Path) -> None:
    sections = [Section("T <1>", ["a & b"], [Table(["k|l", "v"], [["x<y", "1"]])])]
    assert "<h2>T &lt;1&gt;</h2>" in to_html("p", sections) and "<td>x&lt;y</td>" in to_html("p", sections)
    assert "| k\\|l | v |\n|---|---:|\n| x<y | 1 |" in to_markdown("p", sections, tmp_path)


def test_values_that_are_no_numbers_count_as_not_logged(tmp_path: Path) -> None:
    lines = ['{"step": 1, "a": 0.5, "b": NaN}', '{"step": 2, "a": Infinity, "b": 1e999}', '{"step": 3, "a": "x"}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    rows = read_metrics(tmp_path)
    assert points(rows, ["a"]) == ([1], [0.5]) and points(rows, ["b"]) == ([], [])
