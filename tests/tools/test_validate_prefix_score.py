"""The validation of the prefix score on engines whose success probabilities are known."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests" / "tools")]

import prefix_analysis  # noqa: E402
import prefix_states  # noqa: E402
import validate_prefix_score as tool  # noqa: E402
from markov_model import ANSWER, success_probability, write_job  # noqa: E402
from prefix_analysis import Bootstrap  # noqa: E402
from prefix_states import HINTS, MixedProblem, Plan, Response  # noqa: E402
from sampler import Sampler  # noqa: E402

from megatron_rlvr.config.load import load_config  # noqa: E402
from megatron_rlvr.evaluation.journal import Journal  # noqa: E402
from megatron_rlvr.rewards import Scorer  # noqa: E402
from megatron_rlvr.rollout import Completion, SamplingSettings  # noqa: E402
from megatron_rlvr.types import Prompt, UserError  # noqa: E402

RIGHT, WRONG, EOS = 1, 2, 3
LENGTH, LIMIT = 20, 24
FEW = Bootstrap(300)


class Linear:
    """Responses of 20 tokens that all say right or wrong, then stop. A prefix decides how often they are right.

    linear      p = p0 + a (1 - p0) behind a part a of a right response, p0 (1 - a) behind one of a wrong response
    unrelated   another p for every prefix, whatever its problem and position
    """

    version = 0

    def __init__(self, rates, kind="linear"):
        self.rates, self.kind, self.calls = rates, kind, 0

    def probability(self, context):
        rate, given = self.rates[context[0] - 10], len(context) - 2
        if self.kind == "unrelated" and given:
            return float(np.random.default_rng([context[0], given]).random())
        share = given / LENGTH
        return rate + share * (1 - rate) if RIGHT in context[2:] else rate * (1 - share)

    def generate(self, contexts, n, sampling, limits=None):
        self.calls += 1
        given = [len(context) - 2 for context in contexts]
        assert limits == ([LIMIT - tokens for tokens in given] if any(given) else None)
        rng = np.random.default_rng(sampling.seed)
        return [
            [self._completion(rng.random() < self.probability(ids), LENGTH - tokens) for _ in range(n)]
            for ids, tokens in zip(contexts, given, strict=True)
        ]

    def _completion(self, right, length):
        tokens = np.array([RIGHT if right else WRONG] * (length - 1) + [EOS], np.int32)
        return Completion(tokens, np.zeros(length, np.float32), np.zeros(length, np.int32), "stop")


def decode(ids):
    return "\\boxed{yes}" if [token for token in ids if token != EOS][-1] == RIGHT else "\\boxed{no}"


def run(engine, plan, rows=(), journal=None):
    """All that is sampled for `plan`, behind `rows` that are there already."""
    sampler = Sampler(engine, decode, Scorer("strict_box"), SamplingSettings(LIMIT), seed=4)
    prompts = [Prompt(f"p:{i}", (10 + i, 9), "yes") for i in range(len(engine.rates))]
    with Journal(journal, {}) as kept:
        for row in rows:
            kept.append(row)
        states = tool.collect(sampler, prompts, [], plan, kept, progress=False)
        return states, kept.rows


@pytest.fixture(scope="module")
def linear(tmp_path_factory):
    """40 problems with p0 from 5 to 95 %, as they are measured."""
    engine = Linear(np.linspace(0.05, 0.95, 40))
    _, rows = run(engine, Plan(40, 48, 96, 2000), journal=tmp_path_factory.mktemp("linear") / "j")
    return engine, prefix_analysis.analyse(rows, FEW)


def test_a_score_that_is_true_correlates_and_one_that_is_not_does_not(linear, tmp_path):
    _, result = linear
    pooled, *within = result["correlation"]
    assert pooled["pearson"]["value"] > 0.93 and pooled["spearman"]["value"] > 0.9 and pooled["pearson"]["low"] > 0.85
    assert [row["position"] for row in within] == ["25%", "50%", "75%"]
    assert all(row["pearson"]["low"] > 0.5 and row["states"] == 40 for row in within)
    used = [s for s in result["states"] if s["source"] == "success" and 0 < s["fraction"] < 1]
    columns = np.array([[s["predicted"], s["empirical"]] for s in used]).T
    assert pooled["pearson"]["value"] == pytest.approx(np.corrcoef(columns)[0, 1], abs=1e-12)

    engine = Linear(np.linspace(0.05, 0.95, 40), "unrelated")
    other = prefix_analysis.analyse(run(engine, Plan(40, 48, 96, 2000), journal=tmp_path / "j")[1], FEW)["correlation"][
        0
    ]
    for name in ("pearson", "spearman"):
        assert other[name]["low"] < 0 < other[name]["high"] and other[name]["high"] - other[name]["low"] < 0.6


def test_curves_of_given_and_failed_prefixes_are_those_of_the_engine(linear):
    engine, result = linear
    used = [s for s in result["states"] if s["source"] == "success" and s["fraction"] == 0]
    rates = [engine.rates[int(s["problem"].removeprefix("p:"))] for s in used]
    base, error = float(np.mean(rates)), 4 * 0.5 / math.sqrt(96 * len(rates))
    curve = [row["mean"]["value"] for row in result["hint_ratio"]]
    assert [row["given"] for row in result["hint_ratio"]] == list(HINTS)
    assert curve[:4] == pytest.approx([base + a * (1 - base) for a in HINTS[:4]], abs=error) and curve[4] == 1.0
    half = result["hint_ratio"][2]
    expected = np.quantile([(1 + rate) / 2 for rate in rates], [0.25, 0.75])
    assert (half["percentile_25"], half["percentile_75"]) == pytest.approx(tuple(expected), abs=0.06)
    failed = [row["success"]["value"] for row in result["prefixes"] if row["source"] == "failure"]
    assert failed == pytest.approx([base * (1 - a) for a in (0.25, 0.5, 0.75)], abs=error)


def test_a_killed_sampling_goes_on_to_the_same_rows_and_stops_at_enough_problems(tmp_path):
    rates, plan = np.linspace(0, 0.9, 12), Plan(5, 4, 6, 24)
    whole = Linear(rates)
    states, rows = run(whole, plan, journal=tmp_path / "whole")
    assert whole.calls == len(rows) and len(states) == 5 * (5 + 3)
    sampled = [group["problem"] for row in rows if row["stage"] == "initial" for group in row["groups"]]
    assert len(set(sampled)) == len(sampled) == 12 and sampled != sorted(sampled, key=lambda id: int(id[2:]))
    for kept in range(len(rows)):
        rest = Linear(rates)
        assert run(rest, plan, rows[:kept], journal=tmp_path / str(kept)) == (states, rows)
        assert rest.calls == len(rows) - kept
    with pytest.raises(UserError, match="none of 12 problems had right and wrong answers among 4 samples"):
        run(Linear(np.zeros(12)), plan, journal=tmp_path / "none")


def test_prefixes_are_cut_in_tokens_and_the_closing_token_is_never_continued():
    ten = Response(tuple(range(10)), stopped=True)
    assert [len(ten.prefix(a)) for a in HINTS] == [0, 3, 5, 8, 9]
    four = Response((7, 8, 9, EOS), stopped=True)
    assert [four.prefix(a) for a in HINTS] == [(), (7,), (7, 8), (7, 8, 9), (7, 8, 9)]
    cut = Response(tuple(range(10)), stopped=False)
    mixed = MixedProblem(Prompt("p", (1,), "yes"), cut, ten)
    states = list(prefix_states.states_of([mixed], [(mixed.prompt, ten)], limit=10))
    # all ten tokens of a success that was cut at the limit leave no token to sample
    assert [(s.source, s.fraction) for s in states] == [
        *(("success", a) for a in HINTS[:4]),
        *(("failure", a) for a in HINTS[1:4]),
        *(("expert", a) for a in HINTS),
    ]
    assert {s.length for s in states} == {10} and states[1].prompt.prefix == (0, 1, 2)


def state(source, problem, fraction, position, right, samples=16):
    scores = [1] * right + [0] * (samples - right)
    return {
        "source": source,
        "problem": problem,
        "fraction": fraction,
        "position": position,
        "length": 10,
        "scores": scores,
    }


def test_numbers_of_a_small_case():
    groups = [
        {"problem": name, "scores": [1] * right + [0] * (8 - right)} for name, right in (("a", 2), ("b", 6), ("c", 0))
    ]
    found = [
        state("success", "a", 0.25, 3, 4),
        state("success", "b", 0.25, 3, 16),
        state("failure", "a", 0.25, 3, 0),
        state("failure", "b", 0.25, 3, 8),
        state("success", "a", 1.0, 9, 16),
    ]
    rows = [
        {"stage": "initial", "first": 0, "groups": groups},
        {"stage": "continuations", "first": 0, "states": found},
    ]
    result = prefix_analysis.analyse(rows, FEW)
    assert (result["problems_sampled"], result["problems_mixed"], result["problems_used"]) == (3, 2, 2)
    first, second, failed = result["states"][:3]
    # p = 0.7 p0 + 0.3
    assert first["predicted"] == pytest.approx(math.sqrt(0.475 * 0.525), abs=1e-12)
    assert second["predicted"] == pytest.approx(math.sqrt(0.825 * 0.175), abs=1e-12)
    assert (first["empirical"], second["empirical"]) == (pytest.approx(math.sqrt(3) / 4), 0.0)
    assert failed["predicted"] is None  # the score is for prefixes of successes
    assert result["correlation"][0]["pearson"]["value"] == pytest.approx(1.0)
    assert result["correlation"][0]["pearson"]["undefined"] == pytest.approx(0.5, abs=0.1)
    shares = {row["source"]: [row[n] for n in ("all_fail", "mixed", "all_succeed")] for row in result["prefixes"]}
    assert shares == {"failure": [0.5, 0.5, 0.0], "success": [0.0, 0.5, 0.5]}
    assert result["prefixes"][0]["success"]["value"] == 0.25
    quarter = result["hint_ratio"][0]
    assert (quarter["mean"]["value"], quarter["percentile_25"], quarter["percentile_75"]) == (0.625, 0.4375, 0.8125)

    alone = prefix_analysis.analyse([rows[0], {**rows[1], "states": found[:1]}], FEW)
    assert alone["correlation"][0]["pearson"] == {"value": None, "low": None, "high": None, "undefined": 1.0}
    with pytest.raises(UserError, match="no continuations yet"):
        prefix_analysis.analyse(rows[:1], FEW)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A Markov model, its problems and expert answers, and a config for the transformers engine."""
    root = tmp_path_factory.mktemp("validate")
    problems = [{"problem": f"{n}{'=:;'[n % 3]}", "answer": ANSWER} for n in range(24)]
    experts = [{"problem": row["problem"], "response": "+++***\\boxed{1}"} for row in problems[::2]]
    experts += [{"problem": "99=", "response": "++\\boxed{1}"}, {"problem": "1:", "response": "+" * 30}]
    (root / "experts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in experts))
    write_job(root, problems, LIMIT)
    return root


def test_from_a_model_directory_to_a_report(directory, capsys):
    out = directory / "out"
    command = [str(directory / "run.yaml"), "--out", str(out), "--problems", "10", "--resamples", "200"]
    command += ["--experts", str(directory / "experts.jsonl")]
    tool.main(command)
    printed = capsys.readouterr().out
    assert (
        printed == (out / "report.md").read_text()
        and "| pooled | 30 |" in printed
        and "| expert | 50% | 10 |" in printed
    )
    names = {"report.md", "result.json", "samples.jsonl", "config.yaml"}
    assert {p.name for p in out.iterdir()} == names | {"scatter.png", "failed_prefixes.png", "hint_ratio.png"}

    rows = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()][1:]
    texts = dict(line.values() for line in map(json.loads, (directory / "problems.jsonl").read_text().splitlines()))
    names = [f"problems:{n + 1}" for n in range(len(texts))]
    start = dict(zip(names, (text[-1] for text in texts), strict=True))
    surplus, variance = 0.0, 0.0
    for measured in (state for row in rows if row["stage"] == "continuations" for state in row["states"]):
        assert all(t + measured["position"] <= LIMIT for t in measured["tokens"])
        prefix = _tokens(measured["texts"][0])[: measured["position"]]
        last = prefix[-1] if prefix else start[measured["problem"]]
        p = success_probability(last, LIMIT - measured["position"])
        surplus += sum(measured["scores"]) - 16 * p
        variance += 16 * p * (1 - p)
    assert abs(surplus) < 4 * math.sqrt(variance) and variance > 100

    before = {p.name: p.read_bytes() for p in out.iterdir()}
    tool.main(["--rescore", "--out", str(out), "--resamples", "200"])
    tool.main(command)  # finds everything sampled
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    with pytest.raises(UserError, match="was sampled with samples 16, but it is now 8"):
        tool.main([*command, "--samples", "8"])


def _tokens(text):
    """The tiny tokenizer's pieces: the box is one, everything else here one a character."""
    head, box, tail = text.partition("\\boxed{")
    return [*head, *([box] if box else []), *tail]


def test_experts_are_those_that_solve_these_problems_within_the_limit(directory):
    config = load_config(directory / "run.yaml")
    prompts, _ = tool.read_prompts(config)
    experts = tool.read_experts(directory / "experts.jsonl", config, prompts, 50)
    assert {prompt.id for prompt, _ in experts} == {f"problems:{n}" for n in range(1, 25, 2)}
    assert all(len(response.tokens) == 10 and response.stopped for _, response in experts)
    assert tool.read_experts(directory / "experts.jsonl", config, prompts, 3) == experts[:3]
    short = load_config(directory / "run.yaml", ["rollout.max_response_length=9"])
    with pytest.raises(UserError, match="no trajectory of 4 to 9 tokens"):
        tool.read_experts(directory / "experts.jsonl", short, prompts, 50)


def test_faults_are_one_sentence(directory, tmp_path):
    for arguments, message in (
        (["--out", str(tmp_path)], "no config is named"),
        (["--rescore", "--out", str(tmp_path)], "cannot be read .*; sample first"),
        ([str(directory / "run.yaml"), "--out", str(tmp_path), "--samples", "0"], "cannot be sampled"),
        ([str(directory / "run.yaml"), "--out", str(tmp_path), "data.train=null"], "data.train is unset"),
    ):
        with pytest.raises(UserError, match=message):
            tool.main(arguments)
        assert list(tmp_path.iterdir()) == []
