"""Reward functions for the tests: good ones, bad ones, and one that does what the response says."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import TypedDict

import numpy as np


def obedient(response: str, answer: str) -> float | dict[str, float]:
    word, _, argument = response.partition(" ")
    match word:
        case "sleep":
            time.sleep(float(argument))
        case "exit":
            os._exit(int(argument))
        case "leave":
            sys.exit(int(argument))
        case "signal":
            os.kill(os.getpid(), int(argument))
        case "interrupt":
            os.kill(os.getppid(), signal.SIGINT)
        case "raise":
            raise ZeroDivisionError(argument)
        case "allocate":
            return float(len(bytearray(int(argument))))
        case "hang-up":
            os.closerange(3, 64)
            time.sleep(60)
        case "parts":
            return {"correctness": 1.0, "brevity": -0.25, "language": 0.5}
        case "text":
            return argument  # type: ignore[return-value]
        case "nothing":
            return {"brevity": 1.0}
        case "infinite":
            return float("inf")
    return 1.0 if response == answer else -1.0


def shaped_yes(response: str, answer: str) -> dict[str, float]:
    return {"correctness": 1.0 if answer in response else -1.0, "style": 0.25}


def own_overlong(response: str, answer: str) -> dict[str, float]:
    return {"correctness": 1.0, "overlong": -0.5}


def unannotated(response, answer):
    return 1.0


def with_options(response: str, answer: str, scale: float = 1.0) -> dict[str, float]:
    return {"correctness": scale}


class Parts(TypedDict):
    correctness: float


def typed_parts(response: str, answer: str) -> Parts:
    return {"correctness": 1.0}


def numpy_scalar(response: str, answer: str) -> np.float32:
    return np.float32(1.0)


def one_argument(response: str) -> float:
    return 1.0


def keyword_only(response: str, *, answer: str) -> float:
    return 1.0


def promises_text(response: str, answer: str) -> str:
    return ""


async def coroutine(response: str, answer: str) -> float:
    return 1.0


not_a_function = 5
