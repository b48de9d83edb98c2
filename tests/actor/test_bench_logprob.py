"""tools/bench_logprob.py at small sizes: its cases compute the same thing, its memory figures see what they should."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.actor.logprob_reference import error, numbers, plain_logprob

TOOL = Path(__file__).resolve().parents[2] / "tools" / "bench_logprob.py"


@pytest.fixture(scope="module")
def bench():
    specification = importlib.util.spec_from_file_location("bench_logprob", TOOL)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["bench_logprob"] = module
    specification.loader.exec_module(module)
    yield module
    del sys.modules["bench_logprob"]


@pytest.mark.parametrize("name", ["plain", "chunked", "fused"])
def test_every_case_computes_the_log_prob_of_the_labels(bench, name):
    hidden, weight, labels, upstream = bench.Sizes(150, 8, 500, "float32").inputs()
    expected = numbers(lambda h, w: plain_logprob(h, w, labels, 500), hidden.double(), weight.double(), upstream)
    logprobs = bench.CASES[name](hidden, weight, labels)
    logprobs.backward(upstream)
    found = [logprobs.detach(), hidden.grad, weight.grad]
    assert max(error(a, b) for a, b in zip(found, [expected[0], *expected[2:]], strict=True)) < 1e-5


def test_memory_is_an_eighth_of_the_materialised_logits_and_flat_in_tokens(bench):
    """Each figure from a process of its own, as the tool measures it; one copy of the logits is 234 MiB."""
    sizes = {tokens: bench.Sizes(tokens, 32, 60_000, "float32") for tokens in (1024, 2048)}
    plain = bench.memory_of_child("plain", sizes[1024], threads=1)
    fused = {tokens: bench.memory_of_child("fused", sizes[tokens], threads=1) for tokens in sizes}
    logits = 1024 * 60_000 * 4
    assert plain > 2 * logits
    assert 0 < fused[1024] < plain / 8
    assert fused[2048] < fused[1024] + logits / 50


def test_the_table_has_every_case_with_its_ratio_and_the_file_the_same_figures(tmp_path):
    sizes = ["--tokens", "64", "--hidden", "64", "--vocab", "2000", "--repeats", "2", "--memory-tokens"]
    command = [sys.executable, str(TOOL), *sizes, "--json", str(tmp_path / "figures.json")]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert lines[0] == "float32, T=64, hidden 64, vocabulary 2000, 1 thread(s)"
    rows = {line.split()[0]: line.split()[1:] for line in lines[2:]}
    assert list(rows) == list(figures["times"]) == ["products", "plain", "chunked", "megatron", "fused"]
    for name, seconds in figures["times"].items():
        ratio = seconds["cpu"] / figures["times"]["products"]["cpu"]
        assert rows[name] == [f"{seconds['wall']:.2f}", f"{seconds['cpu']:.2f}", f"{ratio:.3f}"]
