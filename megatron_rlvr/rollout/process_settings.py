"""Undo what an engine's start changes for the whole process and the trainer in it does not expect."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def process_settings_kept() -> Iterator[None]:
    """Restore torch's thread count, its setter and default dtype, and the environment except for VLLM_* names.

    vLLM turns torch.set_num_threads into a no-op and exports LD_PRELOAD and LOCAL_WORLD_SIZE, among others.
    """
    set_num_threads, threads, dtype = torch.set_num_threads, torch.get_num_threads(), torch.get_default_dtype()
    environment = dict(os.environ)
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        _restore_environment(environment)


def _restore_environment(environment: dict[str, str]) -> None:
    for name in os.environ.keys() | environment.keys():
        if name.startswith("VLLM_"):
            continue  # vLLM reads them again while it runs
        if name in environment:
            os.environ[name] = environment[name]
        else:
            del os.environ[name]
