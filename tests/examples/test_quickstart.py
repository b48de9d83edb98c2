"""What the quickstart may remove: an earlier quickstart, and nothing else."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import quickstart


def test_only_an_earlier_quickstart_is_cleared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quickstart.clear(tmp_path / "none")
    (tmp_path / "data").mkdir()
    with pytest.raises(SystemExit, match="2"):
        quickstart.clear(tmp_path)
    assert "name a directory of its own" in capsys.readouterr().err and (tmp_path / "data").exists()
    (tmp_path / "init").mkdir()
    quickstart.clear(tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="2"):
        quickstart.clear(tmp_path / "file")
    assert (tmp_path / "file").exists()
