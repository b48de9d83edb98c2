"""The shipped suites are the papers', and faults in a suite are one sentence."""

from __future__ import annotations

import pytest

from megatron_rlvr.config.load import build_tree, dump_config, parse_yaml
from megatron_rlvr.evaluation.suite import SuiteConfig, is_suite, load_suite, suite_names
from megatron_rlvr.types import UserError


def test_respo_is_evaluated_as_published():
    suite = load_suite("respo", ["model=m", "engine=transformers"])
    sizes = {name: (b.problems, b.samples) for name, b in suite.benchmarks.items()}
    assert sizes == {
        "aime25": (30, 16),
        "aime24": (30, 16),
        "amc23": (40, 16),
        "olympiadbench": (674, 4),
        "minervamath": (272, 4),
        "math500": (500, 4),
    }
    sampling = {(b.temperature, b.top_p, b.top_k, b.greedy, b.max_response_length) for b in suite.benchmarks.values()}
    assert sampling == {(1.0, 0.7, -1, False, 16384)}
    assert sum(problems * samples for problems, samples in sizes.values()) == 7384  # App. E.2
    assert (suite.average, suite.bootstrap.resamples, suite.bootstrap.seed, suite.length_bins) == (
        "macro",
        10000,
        0,
        10,
    )
    assert (suite.verifier.name, suite.verifier.timeout) == ("math_verify", 30)
    assert (suite.engine.name, suite.output.parts[-3:]) == ("transformers", ("eval", "respo", "m"))


def test_proximal_kl_is_evaluated_as_published():
    suite = load_suite("proximal_kl", ["model=runs/a/model"])
    counts = {n: (b.problems or b.first, b.samples, b.greedy) for n, b in suite.benchmarks.items()}
    assert {n: c[:2] for n, c in counts.items() if not c[2]} == {
        "aime24": (30, 16),
        "aime25": (30, 16),
        "amc23": (40, 16),
        "amc24": (45, 16),
    }
    assert {n: c[0] for n, c in counts.items() if c[2]} == {
        "math500": 500,
        "olympiadbench": 674,
        "minervamath": 272,
        "gaokao2023en": 383,
    }
    assert sum(problems * samples for problems, samples, _ in counts.values()) == 4149  # App. C.1
    assert suite.average == "micro" and suite.output.name == "a"


def test_a_file_with_benchmarks_is_a_suite_and_a_run_is_none(tmp_path):
    (tmp_path / "run.yaml").write_text("run_dir: r\nmodel: {path: m}\n")
    (tmp_path / "suite.yaml").write_text(
        "suite: own\ndefaults: {samples: 2, top_p: 0.9}\nverifier: {timeout: 5}\n"
        "benchmarks: {a: {data: a.jsonl}, b: {data: 'hub:aime24', samples: 3}}\n"
    )
    assert not is_suite(str(tmp_path / "run.yaml")) and not is_suite(str(tmp_path / "none.yaml"))
    assert is_suite(str(tmp_path / "suite.yaml")) and all(map(is_suite, suite_names()))
    suite = load_suite(str(tmp_path / "suite.yaml"), ["model=m", "benchmarks.b.top_p=1.0", "output=o"])
    assert [(b.samples, b.top_p) for b in suite.benchmarks.values()] == [(2, 0.9), (3, 1.0)]
    assert suite.verifier.name == "math_verify" and str(suite.benchmarks["b"].data) == "hub:aime24"
    assert build_tree(parse_yaml(dump_config(suite), "x"), SuiteConfig) == suite


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "config key model .* is missing"),
        (["model=m", "engine=tgi"], "engine tgi is not known; use vllm, transformers or openai:URL"),
        (["model=m", "benchmarks.aime24.greedy=true"], "benchmarks.aime24.samples is 16, but greedy"),
        (["model=m", "benchmarks.aime24.sample=4"], "unknown config key benchmarks.aime24.sample"),
        (["model=m", "benchmarks={}"], "benchmarks"),
        (["model=m", "benchmarks={a/b: {data: x}}"], "benchmark 'a/b' names a file"),
    ],
)
def test_faults_are_named(overrides, message):
    with pytest.raises(UserError, match=message):
        load_suite("respo", overrides)
