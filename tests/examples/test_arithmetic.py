import json
import re
import sys
from pathlib import Path

import pytest

from megatron_rlvr.rewards import strict_box

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import arithmetic  # noqa: E402


def test_answers_are_the_sums():
    problems = arithmetic.make_problems(500, 3)
    assert len({row["problem"] for row in problems}) == 500
    for row in problems:
        assert re.fullmatch(r"[1-6](\+[1-6]){2,5}=", row["problem"])
        assert eval(row["problem"].rstrip("=")) == int(row["answer"])
    assert {row["problem"].count("+") for row in problems} == {2, 3, 4, 5}


def test_demonstrations_without_faults_are_rewarded():
    for row in arithmetic.make_demonstrations(300, 0, 0.0):
        terms = [int(term) for term in row["problem"].rstrip("=").split("+")]
        chain, box = row["response"].split(" ")
        assert [int(total) for total in chain.split(",")] == [sum(terms[: i + 1]) for i in range(len(terms))]
        assert strict_box(row["response"], str(sum(terms))) == 1.0
        assert box == f"\\boxed{{{sum(terms)}}}"


@pytest.mark.parametrize("probability", [0.1, 0.3])
def test_additions_are_wrong_as_often_as_asked_and_the_chain_goes_on(probability):
    wrong = additions = 0
    for row in arithmetic.make_demonstrations(3000, 1, probability):
        terms = [int(term) for term in row["problem"].rstrip("=").split("+")]
        totals = [int(total) for total in row["response"].split(" ")[0].split(",")]
        assert len(totals) == len(terms) and totals[0] == terms[0] and min(totals) >= 0
        assert row["response"].endswith(f"\\boxed{{{totals[-1]}}}")
        additions += len(terms) - 1
        wrong += sum(b != a + term for a, b, term in zip(totals, totals[1:], terms[1:], strict=False))
    assert wrong / additions == pytest.approx(probability, abs=0.015)


def test_same_seed_same_problems_and_excluded_ones_never_appear():
    heldout = arithmetic.make_problems(200, 1)
    assert heldout == arithmetic.make_problems(200, 1) != arithmetic.make_problems(200, 2)
    banned = {row["problem"] for row in heldout}
    assert not banned & {row["problem"] for row in arithmetic.make_problems(2000, 1, banned)}
    demonstrations = arithmetic.make_demonstrations(5000, 1, 0.3, banned)
    assert not banned & {row["problem"] for row in demonstrations}
    assert demonstrations == arithmetic.make_demonstrations(5000, 1, 0.3, banned)


def test_more_problems_than_exist_are_refused():
    with pytest.raises(ValueError, match="too many"):
        arithmetic.make_problems(109, 0, (), 3, 3)


def test_command_line_writes_disjoint_files(tmp_path, monkeypatch, capsys):
    out = tmp_path / "data"
    counts = ["--train", "300", "--heldout", "100", "--demonstrations", "500"]
    monkeypatch.setattr(sys, "argv", ["arithmetic.py", "--out", str(out), *counts])
    arithmetic.main()
    rows = {file.stem: [json.loads(line) for line in file.read_text().splitlines()] for file in out.iterdir()}
    assert {name: len(lines) for name, lines in rows.items()} == {"train": 300, "heldout": 100, "demonstrations": 500}
    texts = {name: {row["problem"] for row in lines} for name, lines in rows.items()}
    assert not texts["heldout"] & (texts["train"] | texts["demonstrations"])
    assert "300 training" in capsys.readouterr().out
