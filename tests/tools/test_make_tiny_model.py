import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_rlvr.hf import HFCheckpoint, read_model_spec

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "examples")]

import arithmetic  # noqa: E402
import make_tiny_model  # noqa: E402


@pytest.fixture(scope="module", params=["moe", "tied", "qwen3", "llama"])
def directory(request, tmp_path_factory):
    out = tmp_path_factory.mktemp("models") / request.param
    flags = {"moe": [], "tied": ["--tied"]}.get(request.param, ["--family", request.param])
    make_tiny_model.make_tiny_model(make_tiny_model.parser().parse_args([str(out), *flags]))
    return out


def test_sizes_are_what_the_quickstart_promises(directory):
    spec = read_model_spec(directory)
    tensors = load_file(directory / "model.safetensors")
    assert 100_000 < sum(t.numel() for t in tensors.values()) < 500_000
    assert spec.num_layers >= 4 and spec.head_dim * spec.num_attention_heads != spec.hidden_size
    assert spec.num_key_value_heads < spec.num_attention_heads
    assert spec.family == (directory.name if directory.name in make_tiny_model.FAMILIES else "qwen3_moe")
    if spec.family == "qwen3_moe":
        assert (spec.num_experts, spec.num_experts_per_tok, spec.moe_layers) == (8, 2, (True,) * 4)
        assert sum(t.numel() for t in tensors.values()) > 200_000
    HFCheckpoint(directory).check_complete(spec)
    assert ("lm_head.weight" in tensors) == (directory.name != "tied")


def test_tokenizer_gives_the_text_back(directory):
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    assert len(tokenizer) == json.loads((directory / "config.json").read_text())["vocab_size"]
    assert read_model_spec(directory).eos_token_ids == (tokenizer.eos_token_id,)
    rows = arithmetic.make_demonstrations(300, 0, 0.5) + arithmetic.make_problems(100, 0)
    for text in [value for row in rows for value in row.values()] + ["\\boxed{1}\n b\\oxed 105 07"]:
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode([tokenizer.eos_token_id, *ids], skip_special_tokens=True) == text


def test_unknown_characters_do_not_pass_silently(directory):
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    assert tokenizer("3+é")["input_ids"][-1] == tokenizer.unk_token_id


@pytest.mark.parametrize("directory", ["moe", "tied"], indirect=True)
def test_routing_is_not_flat(directory):
    model = AutoModelForCausalLM.from_pretrained(directory)
    tokens = torch.randint(0, 100, (8, 30), generator=torch.Generator().manual_seed(0))
    logits = torch.stack(model(tokens, output_router_logits=True).router_logits)
    top = logits.softmax(-1).topk(2, dim=-1).values.sum(-1)
    # Two of eight experts would hold a quarter of the probability if the router could not tell tokens apart.
    assert top.mean() > 0.5


def test_seed_decides_the_weights(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        args = make_tiny_model.parser().parse_args([str(tmp_path / name), "--seed", str(seed), "--layers", "1"])
        make_tiny_model.make_tiny_model(args)
    a, b, c = (load_file(tmp_path / name / "model.safetensors")["lm_head.weight"] for name in "abc")
    assert torch.equal(a, b) and not torch.equal(a, c)


def test_an_existing_directory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["make_tiny_model.py", str(tmp_path)])
    with pytest.raises(SystemExit, match="already exists"):
        make_tiny_model.main()
