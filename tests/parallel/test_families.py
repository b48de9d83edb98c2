"""Every family and RoPE variant against transformers: log-probs and gradients, whole and cut over two ranks."""

from __future__ import annotations

import json

import pytest
import torch

from tests.parallel.families import CASES, LOSS, MODELS, run_families
from tests.parallel.matrix import load_batch
from tests.parallel.models import load_transformers, token_logprobs


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return run_families(tmp_path_factory.mktemp("families"))


@torch.no_grad()
def transformers_logprobs(folder, model=None):
    model = model or load_transformers(folder / "model")
    return {
        str(t.token_ids[t.action_mask].tolist()): token_logprobs(model, t.token_ids)[t.action_mask[1:]]
        for t in load_batch(folder)
    }


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_every_family_computes_what_transformers_computes(folders, name, layout):
    folder = folders[name]
    results = json.loads((folder / "results" / f"{layout}.json").read_text())
    expected = transformers_logprobs(folder)
    assert results["logprobs"].keys() == expected.keys()
    for ids, values in expected.items():
        torch.testing.assert_close(torch.tensor(results["logprobs"][ids]), values, rtol=0, atol=1e-5)
    assert results["gradient_errors"][LOSS] < 1e-5
    assert results["spread"] == 0.0


@pytest.mark.parametrize("name", [name for name, config in MODELS.items() if "rope_parameters" in config])
def test_the_rope_variant_matters_within_the_test_s_sequences(folders, name):
    folder = folders[name]
    model = load_transformers(folder / "model")
    scaled = transformers_logprobs(folder, model)
    rotary = model.model.rotary_emb
    pairs = len(rotary.inv_freq)
    rotary.attention_scaling, rotary.inv_freq = 1.0, 100.0 ** -(torch.arange(pairs) / pairs)
    plain = transformers_logprobs(folder, model)
    assert max((scaled[ids] - plain[ids]).abs().max() for ids in scaled) > 0.01
