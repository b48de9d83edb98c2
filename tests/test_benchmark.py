"""`eval SUITE` from end to end on a model of known success probabilities: killed, resumed, rescored, compared."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from megatron_rlvr import benchmark, cli
from megatron_rlvr.config.load import load_config, save_resolved
from megatron_rlvr.evaluation.digests import model_digest
from megatron_rlvr.evaluation.suite import load_suite
from megatron_rlvr.types import UserError
from tests.evaluation.test_openai_client import server  # noqa: F401 - a fixture

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests" / "tools")]

from markov_model import success_probability, write_job  # noqa: E402

LIMIT = 24
SAMPLES = 12


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A suite of two benchmarks: 36 problems sampled, 12 of them also greedy."""
    root = tmp_path_factory.mktemp("suite")
    rows = [{"problem": f"{n}{'=:;'[n % 3]}", "answer": "01" if n % 4 == 3 else "1"} for n in range(36)]
    write_job(root, rows, LIMIT)
    suite = {
        "suite": "toy",
        "average": "micro",
        "seed": 1,
        "prompt": {"chat_template": False, "suffix": "", "max_prompt_length": 8},
        "engine": {"name": "transformers", "precision": "float32", "requests": 3 * SAMPLES},
        "verifier": {"name": "strict_box"},
        "defaults": {"max_response_length": LIMIT, "data": str(root / "problems.jsonl")},
        "benchmarks": {"sampled": {"samples": SAMPLES, "problems": 36}, "greedy": {"greedy": True, "first": 12}},
    }
    (root / "suite.yaml").write_text(yaml.safe_dump(suite))
    run(root, "through")
    return root


def run(root, name, *overrides):
    settings = [f"model={root / 'model'}", f"output={root / name}", *overrides]
    return benchmark.evaluate(load_suite(str(root / "suite.yaml"), settings))


def results(root, name="through"):
    return json.loads((root / name / "results.json").read_text())


def generations(root):
    path = root / "through" / "generations" / "sampled.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


def files(output):
    names = ("generations/sampled.jsonl", "generations/greedy.jsonl", "scores.json", "results.json", "results.md")
    return [(output / name).read_bytes() for name in names]


def lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_after(process_id, path, count, alive):
    """SIGKILL once `path` has more than `count` lines; False where the process ended before."""
    deadline = time.monotonic() + 200
    while alive() and time.monotonic() < deadline:
        if lines(path) > count:
            os.kill(process_id, signal.SIGKILL)
            return True
        time.sleep(0.002)
    return False


def test_a_killed_evaluation_goes_on_to_the_same_result(job):
    journal = job / "killed" / "generations" / "sampled.jsonl"
    child = os.fork()
    if child == 0:  # the libraries are loaded already; a fresh interpreter would take most of the time
        os.close(1), os.close(2)
        run(job, "killed")
        os._exit(0)
    ended = []
    killed = kill_after(child, journal, 5, lambda: not ended and os.waitpid(child, os.WNOHANG)[0] == 0)
    if killed:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    left = journal.read_bytes()
    assert killed and 5 < left.count(b"\n") < 37 and not (job / "killed" / "results.json").exists()
    with pytest.raises(UserError, match=r"no suite.yaml; name the output directory of a finished `eval`"):
        benchmark.rescore(job / "killed", [])
    page = run(job, "killed")
    assert journal.read_bytes().startswith(left[: left.rindex(b"\n") + 1])
    assert files(job / "killed") == files(job / "through") and f"| sampled | 36 | {SAMPLES} |" in page


def test_accuracy_is_that_of_the_chain(job):
    """Each (problem, sample) draws with a seed of its own, and still every sample is an independent one."""
    scores = json.loads((job / "through" / "scores.json").read_text())["sampled"]
    correct = np.array(scores["correct"])
    answered = np.array([answer == "1" for answer in scores["answers"]])
    for start in range(3):
        chosen = correct[(np.arange(36) % 3 == start) & answered]
        p = success_probability("=:;"[start], LIMIT)
        assert chosen.mean() == pytest.approx(p, abs=4 * (p * (1 - p) / chosen.size) ** 0.5)
    assert not correct[~answered].any()
    assert len({tuple(row) for row in correct[answered].tolist()}) > 15
    tree = results(job)
    assert tree["benchmarks"]["sampled"]["mean"] == pytest.approx(correct.mean())
    assert tree["benchmarks"]["sampled"]["majority"] == answered[correct.any(1) | ~answered].sum() / 36
    greedy = tree["benchmarks"]["greedy"]
    assert tree["average"]["micro"]["mean"] == pytest.approx(
        (correct.sum() + 12 * greedy["mean"]) / (36 * SAMPLES + 12)
    )
    assert {path.name for path in (job / "through" / "plots").iterdir()} == {
        "accuracy.png",
        "length_bins.png",
        "pass_at_k.png",
    }
    bins = tree["length_bins"]
    assert sum(bins["counts"]) == 36 * SAMPLES + 12 and bins["upper_bounds"][-1] == LIMIT
    cut = np.array([[r["finish_reason"] == "length" for r in row["responses"]] for row in generations(job)])
    assert tree["benchmarks"]["sampled"]["truncated"] == cut.mean() > 0


def test_stored_responses_are_judged_again_and_runs_compared(job, monkeypatch, capsys):
    run(job, "other", "seed=2")
    generated = (job / "other" / "generations" / "sampled.jsonl").read_bytes()
    before = results(job, "other")
    monkeypatch.setattr(benchmark, "_start_engine", None)  # nothing is sampled from here on
    assert cli.main(["eval", "rescore", str(job / "other"), "verifier.name=normalized_box"]) == 0
    after = results(job, "other")
    assert (job / "other" / "generations" / "sampled.jsonl").read_bytes() == generated
    assert after["benchmarks"]["sampled"]["mean"] > before["benchmarks"]["sampled"]["mean"]  # 01 is 1
    with pytest.raises(UserError, match=r"benchmarks.sampled.top_p=0.5 cannot change without sampling again"):
        benchmark.rescore(job / "other", ["benchmarks.sampled.top_p=0.5"])

    output = job / "comparison"
    assert cli.main(["eval", "compare", str(job / "through"), str(job / "other"), f"output={output}"]) == 0
    printed = capsys.readouterr().out
    assert "| other − through | **average** |" in printed
    assert "judged differently (through by strict_box, other by normalized_box)" in printed
    tree = json.loads((output / "comparison.json").read_text())
    assert [(found["verifier"], found["seed"]) for found in tree["runs"].values()][1] == ("normalized_box", 2)
    (contrast,) = tree["contrasts"]
    difference = after["benchmarks"]["sampled"]["mean"] - before_mean(job)
    assert contrast["benchmarks"]["sampled"]["difference"] == pytest.approx(difference)
    counts = [np.array(found["length_bins"]["counts"]) for found in tree["runs"].values()]
    assert all(c.sum() == 36 * SAMPLES + 12 for c in counts) and (counts[0] != counts[1]).any()
    bounds = {tuple(found["length_bins"]["upper_bounds"]) for found in tree["runs"].values()}
    assert len(bounds) == 1
    with pytest.raises(UserError, match="were asked different problems of sampled"):
        benchmark.compare([job / "through", _other_answers(job)], [f"output={output}"])


def before_mean(job):
    return results(job)["benchmarks"]["sampled"]["mean"]


def _other_answers(job):
    scores = json.loads((job / "through" / "scores.json").read_text())
    scores["sampled"]["answers"][3] = "9"
    directory = job / "other-answers"
    directory.mkdir()
    (directory / "scores.json").write_text(json.dumps(scores))
    (directory / "suite.yaml").write_bytes((job / "through" / "suite.yaml").read_bytes())
    return directory


def test_other_settings_and_faults_are_refused_before_anything_is_written(job):
    with pytest.raises(UserError, match="was sampled with seed 1, but it is now 3; go on with the same settings"):
        run(job, "through", "seed=3")
    with pytest.raises(UserError, match="has 36 problems, but 30 are expected"):
        run(job, "new", "benchmarks.sampled.problems=30")
    with pytest.raises(UserError, match=r"has 2 tokens, more than data.max_prompt_length=1"):
        run(job, "new", "prompt.max_prompt_length=1")
    with pytest.raises(UserError, match="model nowhere is neither a Hugging Face directory nor a run"):
        run(job, "new", "model=nowhere")
    assert not (job / "new").exists()


def test_a_server_that_breaks_down_is_gone_on_with(job, server):  # noqa: F811
    url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    overrides = [f"engine=openai:{url}", "model=served", "engine.retries=0", "engine.concurrency=4"]
    overrides += ["benchmarks.sampled.samples=2", "engine.requests=8"]
    limit = 30

    def broken(path, body):
        if len(server.asked) > limit:
            return {"error": "gone"}
        return {"choices": [{"text": "\\boxed{1}"}], "usage": {"completion_tokens": 3 + body["seed"] % 5}}

    server.answer = broken
    with pytest.raises(UserError, match="speaks OpenAI's interface"):
        run(job, "served", *overrides)
    kept = lines(job / "served" / "generations" / "sampled.jsonl") - 1
    assert 0 < kept <= limit // 2
    limit, first = 10**6, len(server.asked)
    page = run(job, "served", *overrides)
    assert len(server.asked) - first <= 36 * 2 + 12 - 2 * (kept - kept % 4)  # whole chunks are not asked for again
    scores = json.loads((job / "served" / "scores.json").read_text())["sampled"]
    assert np.mean(scores["correct"]) == 27 / 36 and "served" in page


def test_a_run_directory_gives_its_model_and_its_prompts(job, tmp_path):
    config = load_config(job / "run.yaml", [f"run_dir={tmp_path}", "data.suffix=S", "data.chat_template=true"])
    save_resolved(config, tmp_path / "config.yaml")
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "model").symlink_to(job / "model")
    for named in (tmp_path, tmp_path / "model"):
        suite, model = benchmark.resolve(load_suite("respo", [f"model={named}"]))
        assert model == tmp_path / "model" and (suite.prompt.chat_template, suite.prompt.suffix) == (True, "S")
    suite, model = benchmark.resolve(load_suite("respo", [f"model={job / 'model'}", "prompt.chat_template=false"]))
    assert not suite.prompt.chat_template and suite.prompt.suffix.endswith("\\boxed{}.")
    assert model_digest(model) == model_digest(tmp_path / "model")
    suite, model = benchmark.resolve(load_suite("respo", ["model=served", "engine=openai:http://h/v1"]))
    assert model is None and suite.prompt.chat_template


def test_names_that_are_no_suite_are_refused(capsys):
    assert cli.main(["eval", "resqo", "model=m"]) == 2
    assert "resqo is no suite; use proximal_kl, respo, a suite's YAML file or a run's" in capsys.readouterr().err


@pytest.mark.nightly
def test_vllm_killed_five_times_at_random_ends_as_one_that_ran_through(job):
    overrides = ["engine=vllm", "engine.max_num_seqs=16", "benchmarks.sampled.samples=64", "engine.requests=64"]

    def start(name):
        arguments = ["eval", str(job / "suite.yaml"), f"model={job / 'model'}", f"output={job / name}", *overrides]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "megatron_rlvr", *arguments]
        return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE)

    through = start("vllm-through")
    assert through.communicate(timeout=600)[1] is not None and through.returncode == 0
    draw = random.Random(0)
    journal = job / "vllm-killed" / "generations" / "sampled.jsonl"
    for kill in range(5):
        process = start("vllm-killed")
        target = lines(journal) + draw.randint(1, 5)
        assert kill_after(process.pid, journal, target, lambda: process.poll() is None), kill  # noqa: B023
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    last = start("vllm-killed")
    _, errors = last.communicate(timeout=600)
    assert last.returncode == 0, errors
    assert files(job / "vllm-killed") == files(job / "vllm-through")
