"""Sampling from any server that speaks OpenAI's HTTP interface, with the standard library alone."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from megatron_rlvr.data import Problem
from megatron_rlvr.data.prompts import with_instruction
from megatron_rlvr.evaluation.generation import Response
from megatron_rlvr.evaluation.suite import BenchmarkConfig
from megatron_rlvr.types import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")
REPEATED = frozenset([408, 409, 425, 429, 500, 502, 503, 504])  # states of a server that may pass
LONGEST_WAIT = 60.0  # seconds between two attempts


@dataclass(frozen=True)
class Server:
    """Where requests go and how failures are treated.

    url      address up to and including /v1
    timeout  seconds without an answer; retries: repetitions of a request after that, or after a passing fault
    wait     sleeps for some seconds
    """

    url: str
    model: str
    key: str | None = None
    timeout: float = 1800.0
    retries: int = 5
    concurrency: int = 64
    wait: Callable[[float], None] = time.sleep


class OpenAISampler:
    """`Sampler` on a server: chat completions of the problem as one user message, or completions of its plain text.

    Every response is a request of its own with its own seed, so that a repetition asks for the same response again.
    Token counts are the server's (usage.completion_tokens).
    """

    def __init__(self, server: Server, *, chat: bool, suffix: str) -> None:
        self._server, self._chat, self._suffix = server, chat, suffix

    def check(self, problems: Sequence[Problem], benchmark: BenchmarkConfig) -> None:
        """Nothing can be known of lengths here: the server refuses prompts that are too long."""

    def sample(
        self, problems: Sequence[Problem], seeds: Sequence[int], benchmark: BenchmarkConfig
    ) -> Iterator[list[Response]]:
        """The responses to each problem in order. Raises UserError where the server refuses or stays unreachable."""
        bodies = [
            self._body(problem, seed + sample, benchmark)
            for problem, seed in zip(problems, seeds, strict=True)
            for sample in range(benchmark.samples)
        ]
        responses = in_order(self._ask, bodies, self._server.concurrency)
        for _ in problems:
            yield [next(responses) for _ in range(benchmark.samples)]

    def close(self) -> None:
        """Nothing is held open between requests."""

    def _body(self, problem: Problem, seed: int, benchmark: BenchmarkConfig) -> dict[str, Any]:
        text = with_instruction(problem.text, self._suffix)
        body: dict[str, Any] = {
            "model": self._server.model,
            "max_tokens": benchmark.max_response_length,
            "temperature": 0.0 if benchmark.greedy else benchmark.temperature,
            "top_p": 1.0 if benchmark.greedy else benchmark.top_p,
            "seed": seed,
        }
        if benchmark.top_k != -1 and not benchmark.greedy:
            body["top_k"] = benchmark.top_k  # not OpenAI's own, but vLLM's and SGLang's
        return body | ({"messages": [{"role": "user", "content": text}]} if self._chat else {"prompt": text})

    def _ask(self, body: Mapping[str, Any]) -> Response:
        path = "/chat/completions" if self._chat else "/completions"
        return read_response(post(self._server, path, body), self._server.url)


def in_order(function: Callable[[Item], Result], items: Sequence[Item], width: int) -> Iterator[Result]:
    """`function` of every item, `width` at once, in the order of the items. Raises what it raises, at its item.

    The threads are daemons: a process that gives up does not wait for requests that are still open.
    """
    waiting = deque((item, Future[Result]()) for item in items)
    futures = [future for _, future in waiting]

    def work() -> None:
        while True:
            try:
                item, future = waiting.popleft()
            except IndexError:
                return
            try:
                future.set_result(function(item))
            except BaseException as error:
                future.set_exception(error)

    for _ in range(min(width, len(items))):
        threading.Thread(target=work, daemon=True).start()
    try:
        for future in futures:
            yield future.result()
    finally:
        waiting.clear()


def post(server: Server, path: str, body: Mapping[str, Any]) -> Any:
    """The server's answer to `body`, from the first attempt that succeeds.

    Raises UserError for a request that the server refuses, and after the last repetition.
    """
    headers = {"Content-Type": "application/json"}
    if server.key is not None:
        headers["Authorization"] = f"Bearer {server.key}"
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), headers)
    for attempt in range(server.retries + 1):
        try:
            with urllib.request.urlopen(request, timeout=server.timeout) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                fault, after = _refusal(error), error.headers.get("Retry-After")
            if error.code not in REPEATED:
                raise UserError(f"{server.url}{path} refuses the request ({fault}); adapt engine or suite") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            fault, after = str(error) or type(error).__name__, None
        if attempt < server.retries:
            server.wait(_pause(attempt, after))
    raise UserError(
        f"{server.url}{path} did not answer in {server.retries + 1} attempts ({fault}); start the server or raise "
        "engine.retries, then run the command again: what was sampled is kept"
    )


def read_response(answer: Any, url: str) -> Response:
    """The one response in a server's answer. Raises UserError where it is not in OpenAI's form."""
    try:
        choice = answer["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        length = int(answer["usage"]["completion_tokens"])
    except (KeyError, IndexError, TypeError, ValueError):
        raise UserError(
            f"{url} answered without choices or usage.completion_tokens ({json.dumps(answer)[:200]}); use a server "
            "that speaks OpenAI's interface"
        ) from None
    return Response(text or "", length, "length" if choice.get("finish_reason") == "length" else "stop")


def _refusal(error: urllib.error.HTTPError) -> str:
    """Status and what the server says of it, in a line."""
    said = error.read(2000).decode(errors="replace")
    try:
        content = json.loads(said)
        said = str(content.get("error", content).get("message", said))
    except (ValueError, AttributeError):
        pass
    return f"{error.code} {' '.join(said.split())[:300]}".strip()


def _pause(attempt: int, after: str | None) -> float:
    """Seconds before the next attempt: what the server asks for, else doubling with jitter, so that clients part."""
    if after is not None and after.strip().isdecimal():
        return min(float(after), LONGEST_WAIT)
    return min(2.0**attempt, LONGEST_WAIT) * (0.5 + 0.5 * random.random())
