"""Reward functions of the user's, named by import path and checked before a run starts."""

from __future__ import annotations

import importlib
import inspect
import math
import types
import typing
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import numpy as np

from megatron_rlvr.files import first_line
from megatron_rlvr.types import UserError

MATH_VERIFY = "math_verify"
REMEDY = "write it as def reward(response: str, answer: str) -> float, or -> dict[str, float] with a 'correctness'"

RewardFunction = Callable[[str, str], Any]


def load_function(path: str) -> RewardFunction:
    """The function at "package.module:function", its signature checked.

    Raises UserError where there is none, where it cannot be called as function(response, answer), or where its
    annotations promise something else than a number or a dict.
    """
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise UserError(f"rewards.function={path} is no import path; write it as package.module:function.")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except Exception as error:  # importing runs the module, which may raise anything
        said = first_line(error) if isinstance(error, ImportError | AttributeError) else repr(error).splitlines()[0]
        raise UserError(
            f"rewards.function={path} cannot be imported ({said}); name a function that Python finds from here."
        ) from error
    if not callable(function):
        raise UserError(f"rewards.function={path} is a {type(function).__name__}, not a function; {REMEDY}.")
    _check_signature(path, function)
    return function


def read_value(path: str, value: Any) -> dict[str, float]:
    """A reward function's return value as named parts, `correctness` always among them.

    Raises UserError for anything but a finite number, or a dict of finite numbers with a `correctness`.
    """
    parts = value if isinstance(value, Mapping) else {"correctness": value}
    if "correctness" not in parts:
        raise UserError(f"rewards.function={path} returned a dict without 'correctness'; {REMEDY}.")
    for name, part in parts.items():
        if not isinstance(name, str) or not name or not _is_finite(part):
            shown = repr(part)[:50]
            raise UserError(f"rewards.function={path} returned {name!r}: {shown}, not a finite number; {REMEDY}.")
    return {name: float(part) for name, part in parts.items()}


def _is_finite(value: Any) -> bool:
    """Whether `value` is a number, also of numpy's, that a float can hold."""
    try:
        return isinstance(value, Real | np.bool_) and math.isfinite(value)
    except OverflowError:  # an integer beyond the floats
        return False


def _is_reward(promised: Any) -> bool:
    """Whether an annotation can mean a number or a dict; of a union, whether one of its members can."""
    if typing.get_origin(promised) in (typing.Union, types.UnionType):
        return any(_is_reward(member) for member in typing.get_args(promised))
    kind = typing.get_origin(promised) or promised
    return kind in (Any, object) or (isinstance(kind, type) and issubclass(kind, (Real, np.bool_, Mapping)))


def _check_signature(path: str, function: RewardFunction) -> None:
    try:
        inspect.signature(function).bind("response", "answer")
    except TypeError as error:
        raise UserError(f"rewards.function={path} cannot take a response and an answer ({error}); {REMEDY}.") from error
    except ValueError:  # a built-in without a signature
        return
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise UserError(f"rewards.function={path} is a coroutine or a generator; {REMEDY}.")
    try:
        promised = typing.get_type_hints(function).get("return")
    except (NameError, TypeError, AttributeError):
        return
    if promised is not None and not _is_reward(promised):
        raise UserError(f"rewards.function={path} promises to return {promised}; {REMEDY}.")
