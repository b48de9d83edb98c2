"""A small HTTP server in this process: what it is asked, and what becomes of its faults."""

from __future__ import annotations

import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from megatron_rlvr.data import Problem
from megatron_rlvr.evaluation.openai_client import OpenAISampler, Server, in_order
from megatron_rlvr.evaluation.suite import BenchmarkConfig
from megatron_rlvr.types import UserError

PROBLEMS = [Problem("p:1", "1+1=", "2"), Problem("p:2", "2+2=", "4")]


class Handler(BaseHTTPRequestHandler):
    """Answers with prompt and seed; before that with the faults that are scripted for the seed, one a request."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.asked.append((self.path, self.headers.get("Authorization"), body))
            server.open += 1
            server.most = max(server.most, server.open)
            faults = server.faults.get(body["seed"], [])
            fault = faults.pop(0) if faults else None
        threading.Event().wait(0.01)
        with server.lock:
            server.open -= 1
        if fault == "cut":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"choices":')
            self.close_connection = True
        elif fault is not None:
            self._answer(fault, {"error": {"message": "out of\nreach"}}, {"Retry-After": "3"} if fault == 429 else {})
        else:
            self._answer(200, server.answer(self.path, body), {})

    def _answer(self, code, content, headers):
        data = json.dumps(content).encode()
        self.send_response(code)
        for key, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments):
        pass


def answer(path, body):
    text = body["messages"][0]["content"] if path.endswith("chat/completions") else body["prompt"]
    said = f"{text}|{body['seed']}"
    choice = {"message": {"content": said}} if path.endswith("chat/completions") else {"text": said}
    reason = "length" if body["seed"] % 2 else "stop"
    return {"choices": [choice | {"finish_reason": reason}], "usage": {"completion_tokens": len(said)}}


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.lock, http.asked, http.faults = threading.Lock(), [], {}
        http.open = http.most = 0
        http.answer = answer
        http.handle_error = lambda *ignored: None  # of clients that have given up
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield http
        http.shutdown()
        thread.join()


def sampler(server, *, chat=True, suffix=" go", waits=None, **settings):
    url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    wait = (lambda seconds: None) if waits is None else waits.append
    return OpenAISampler(Server(url, "m", wait=wait, **{"timeout": 5, **settings}), chat=chat, suffix=suffix)


def benchmark(**changes):
    return BenchmarkConfig(**{"data": Path("p"), "samples": 3, "max_response_length": 9, **changes})


def test_every_sample_is_a_request_with_its_own_seed_in_order(server):
    found = list(sampler(server, key="k", concurrency=2).sample(PROBLEMS, [10, 20], benchmark(top_p=0.7)))
    assert [[r.text for r in responses] for responses in found] == [
        ["1+1= go|10", "1+1= go|11", "1+1= go|12"],
        ["2+2= go|20", "2+2= go|21", "2+2= go|22"],
    ]
    assert [r.finish_reason for r in found[0]] == ["stop", "length", "stop"] and found[0][0].length == 10
    asked = {body["seed"]: (path, key, body) for path, key, body in server.asked}
    path, key, body = asked[21]
    assert (path, key) == ("/v1/chat/completions", "Bearer k")
    assert body == {
        "model": "m",
        "max_tokens": 9,
        "temperature": 1.0,
        "top_p": 0.7,
        "seed": 21,
        "messages": [{"role": "user", "content": "2+2= go"}],
    }
    assert server.most <= 2


def test_raw_prompts_greedy_decoding_and_top_k(server):
    list(sampler(server, chat=False).sample(PROBLEMS[:1], [5], benchmark(samples=1, greedy=True, top_k=7)))
    list(sampler(server, chat=False).sample(PROBLEMS[:1], [6], benchmark(samples=1, temperature=0.5, top_k=7)))
    greedy, drawn = (body for _, _, body in server.asked)
    assert greedy["prompt"] == "1+1= go" and greedy["temperature"] == 0 and "top_k" not in greedy
    assert (drawn["temperature"], drawn["top_k"]) == (0.5, 7)


def test_passing_faults_are_repeated_with_the_same_seed(server):
    server.faults = {10: [503, 429], 11: ["cut"], 21: [500]}
    waits: list[float] = []
    found = list(sampler(server, waits=waits).sample(PROBLEMS, [10, 20], benchmark()))
    assert [len(responses) for responses in found] == [3, 3] and found[0][1].text == "1+1= go|11"
    assert Counter(body["seed"] for _, _, body in server.asked) == {10: 3, 11: 2, 12: 1, 20: 1, 21: 2, 22: 1}
    assert len(waits) == 4 and 3.0 in waits  # what the server asked for
    assert all(0.5 <= wait <= 2 for wait in waits if wait != 3.0)


def test_refusals_and_dead_servers_are_one_sentence(server):
    server.faults = {10: [400]}
    with pytest.raises(UserError, match=r"refuses the request \(400 out of reach\); adapt engine or suite"):
        list(sampler(server).sample(PROBLEMS[:1], [10], benchmark(samples=1)))
    server.faults = {10: [503] * 9}
    with pytest.raises(UserError, match=r"did not answer in 3 attempts \(503 out of reach\)"):
        list(sampler(server, retries=2).sample(PROBLEMS[:1], [10], benchmark(samples=1)))
    server.faults, server.answer = {}, lambda path, body: {"choices": []}
    with pytest.raises(UserError, match="speaks OpenAI's interface"):
        list(sampler(server).sample(PROBLEMS[:1], [10], benchmark(samples=1)))
    nobody = Server("http://127.0.0.1:9/v1", "m", retries=1, wait=lambda seconds: None)
    with pytest.raises(UserError, match="did not answer in 2 attempts"):
        list(OpenAISampler(nobody, chat=True, suffix="").sample(PROBLEMS[:1], [10], benchmark(samples=1)))


def test_a_silent_server_is_given_up_after_the_timeout(server):
    release = threading.Event()
    server.answer = lambda path, body: release.wait(5) and {}
    with pytest.raises(UserError, match=r"did not answer in 1 attempts .*timed out"):
        list(sampler(server, timeout=0.2, retries=0).sample(PROBLEMS[:1], [10], benchmark(samples=1)))
    release.set()


def test_results_keep_the_order_and_an_error_ends_the_rest():
    done = []

    def square(n):
        done.append(n)
        if n == 5:
            raise ValueError("five")
        return n * n

    found = in_order(square, range(50), 1)
    assert [next(found) for _ in range(5)] == [0, 1, 4, 9, 16]
    with pytest.raises(ValueError, match="five"):
        next(found)
    assert list(in_order(square, [3, 2, 1], 8)) == [9, 4, 1] and list(in_order(square, [], 4)) == []
