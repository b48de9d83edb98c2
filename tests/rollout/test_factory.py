from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from megatron_rlvr.config.tree import RunConfig
from megatron_rlvr.rollout import SamplingSettings, build_engine, sampling_settings
from megatron_rlvr.types import ModelSpec, UserError
from tests.rollout.models import EOS, contexts, oracle_logprobs


def run_config(path, **rollout):
    return RunConfig(
        run_dir="unused",
        model={"path": path},
        data={"train": "unused", "max_prompt_length": 40},
        rollout={"precision": "float32", "max_response_length": 24, "max_num_seqs": 16} | rollout,
    )


def spec(eos):
    return ModelSpec("qwen3_moe", 3, 64, 4, 2, 32, 96, 64, 128, 1e-6, 1e4, False, True, False, eos)


@pytest.mark.parametrize("kind", ["vllm", "transformers"])
def test_section_decides_engine_limits_and_stops(models, kind):
    engine = build_engine(run_config(models[0], engine=kind), spec((EOS, 9)), torch.device("cpu"))
    assert type(engine).__name__.lower() == f"{kind}engine"
    given = contexts(3, seed=60)
    assert np.abs(engine.score(given)[0] - oracle_logprobs(models[0], given[:1])[0]).max() < 1e-5
    ends = {
        int(c.token_ids[-1])
        for g in engine.generate(given, 16, SamplingSettings(24))
        for c in g
        if len(c.token_ids) < 24
    }
    assert ends == {EOS, 9}
    with pytest.raises(UserError, match="max_model_len 64"):
        engine.generate([[5] * 41], 1, SamplingSettings(24))
    engine.close()


def test_sampling_follows_the_section(models):
    config = run_config(models[0], temperature=0.7, top_p=0.9, top_k=5)
    assert sampling_settings(config, 11) == SamplingSettings(24, 0.7, 0.9, 5, False, 11)


def test_neither_engine_is_imported_before_it_is_asked_for():
    program = "import sys, megatron_rlvr.rollout; sys.exit(any(m in sys.modules for m in ('vllm', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
