"""What is counted of a response beside its verdict, and scores as a file."""

from __future__ import annotations

import pytest

from megatron_rlvr.evaluation.scoring import load_scores, loops, open_judge, save_scores, score, vote
from megatron_rlvr.evaluation.suite import VerifierConfig
from megatron_rlvr.types import UserError

STEP = "so the sum is forty-two and the remainder is seven, "  # 52 characters


def row(index, answer, *responses):
    sampled = [{"text": text, "length": length, "finish_reason": reason} for text, length, reason in responses]
    return {"index": index, "id": f"p:{index}", "problem": "", "answer": answer, "responses": sampled}


def rows():
    return [
        row(0, "1/2", ("\\boxed{1/2}", 7, "stop"), ("\\boxed{ 1/2 } \\boxed{2}", 9, "stop")),
        row(1, "1000", ("no box", 10, "length"), ("\\boxed{1,000}", 10, "stop")),
    ]


def test_scores_keep_what_the_statistics_need(tmp_path):
    told = []
    with open_judge(VerifierConfig(name="normalized_box")) as judge:
        found = score(rows(), 10, judge, told.append)
    assert found.correct == [[1, 0], [0, 1]] and found.outcomes == {"correct": 2, "wrong": 2}
    assert found.votes == [["1 / 2", "2"], [None, "1000"]]
    assert found.truncated == [[0, 0], [1, 0]] and found.capped.tolist() == [[False, False], [True, True]]
    assert (found.ids, found.answers, found.samples, sum(told)) == (["p:0", "p:1"], ["1/2", "1000"], 2, 4)
    with open_judge(VerifierConfig(name="strict_box")) as judge:
        assert score(rows(), 10, judge, told.append).correct == [[1, 0], [0, 0]]
    save_scores({"b": found}, tmp_path / "scores.json")
    assert load_scores(tmp_path / "scores.json") == {"b": found}
    (tmp_path / "scores.json").write_text('{"b": {"ids": []}}')
    with pytest.raises(UserError, match="does not hold scores; run `eval rescore`"):
        load_scores(tmp_path / "scores.json")
    with pytest.raises(UserError, match="name the output directory of `eval`"):
        load_scores(tmp_path / "none.json")


def test_a_response_loops_where_its_end_stands_in_it_four_times():
    assert loops("Let us see. " + STEP * 12) and loops("a" * 256)
    assert not loops(STEP * 4) and not loops(
        STEP * 12 + "therefore the answer is \\boxed{7} and nothing else than 7, as said."
    )
    assert not loops("".join(f"step {n}: {n * n * 7919}; " for n in range(400))) and not loops("")


def test_empty_boxes_and_missing_functions():
    assert (vote("\\boxed{}"), vote("\\boxed{x"), vote("x"), vote("\\boxed{$0.50$}")) == (None, None, None, "0.5")
    with pytest.raises(UserError, match=r"names no function; set verifier.function"):
        open_judge(VerifierConfig(name="custom"))
