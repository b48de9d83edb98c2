"""Reward functions of the user's: which are taken, which are refused, and in which words."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_rlvr.rewards.custom import load_function, read_value
from megatron_rlvr.types import UserError

HERE = "tests.rewards.functions:"


@pytest.mark.parametrize("name", ["obedient", "unannotated", "with_options", "typed_parts", "numpy_scalar"])
def test_functions_of_a_response_and_an_answer_are_taken(name: str) -> None:
    assert load_function(HERE + name).__name__ == name


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("no_colon", "is no import path; write it as package.module:function"),
        ("no_such_package_here:f", "cannot be imported"),
        (HERE + "absent", "cannot be imported"),
        (HERE + "not_a_function", "is a int, not a function"),
        (HERE + "one_argument", "cannot take a response and an answer"),
        (HERE + "keyword_only", "cannot take a response and an answer"),
        (HERE + "promises_text", "promises to return <class 'str'>"),
        (HERE + "coroutine", "is a coroutine or a generator"),
    ],
)
def test_others_are_refused_with_path_and_remedy(path: str, words: str) -> None:
    with pytest.raises(UserError) as error:
        load_function(path)
    message = str(error.value)
    assert message.startswith(f"rewards.function={path} ") and words in message and "\n" not in message
    assert "write it as" in message or "name a function" in message


def test_values_become_named_parts() -> None:
    assert read_value("f", 1) == {"correctness": 1.0} and read_value("f", True) == {"correctness": 1.0}
    assert (
        read_value("f", np.float32(0.5)) == {"correctness": 0.5}
        and read_value("f", np.bool_(False))["correctness"] == 0
    )
    assert read_value("f", {"correctness": -1, "style": 0.5}) == {"correctness": -1.0, "style": 0.5}


@pytest.mark.parametrize(
    "value", [None, "1", [1.0], float("nan"), {"correctness": None}, {"correctness": 1, "": 2}, {}, 10**400]
)
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(UserError, match=r"rewards\.function=f returned"):
        read_value("f", value)


def test_a_module_that_fails_as_it_is_imported_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module_with_a_fault.py").write_text("undefined_name\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"cannot be imported \(NameError\(.*undefined_name.*; name a function"):
        load_function("module_with_a_fault:reward")
