"""A checkpoint that samples a Markov chain over tokens, so that success probabilities are known from the chain alone.

Attention and MLP write nothing; embeddings are one-hot, and the head turns the last token's row into the logarithm of
the chain's transition probabilities. The chain of a problem "<n>=": it opens with `start[n]`, walks among `+` (nothing
decided), `*` (will be right) and `-` (will be wrong), and ends with a box that holds 1 from `*` only.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
import yaml
from make_tiny_model import BOX, build_tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

NEVER = 1e-9
# From each token: where the chain goes, and how often. A wrong walk ends without a box.
CHAIN: dict[str, dict[str, float]] = {
    "+": {"+": 0.76, "*": 0.12, "-": 0.12},
    "*": {"*": 0.7, "+": 0.1, BOX: 0.2},
    "-": {"-": 0.7, "+": 0.1, "<eos>": 0.2},
    BOX: {"1": 1.0},
    "1": {"}": 1.0},
    "}": {"<eos>": 1.0},
}
# The last token of a problem's text decides how it begins.
STARTS: dict[str, dict[str, float]] = {
    "=": {"+": 1.0},
    ":": {"-": 0.9, "+": 0.1},
    ";": {"*": 0.9, "+": 0.1},
}
ANSWER = "1"


def success_probability(last: str, tokens_left: int) -> float:
    """Probability that a response whose last token is `last` gets its whole box within `tokens_left` more tokens."""
    if last == "}":
        return 1.0
    if tokens_left == 0 or last == "<eos>":
        return 0.0
    rows = {**CHAIN, **STARTS}
    names = [*rows, "<eos>"]
    value = np.array([float(name == "}") for name in names])
    step = np.array([[rows.get(a, {}).get(b, 0.0) for b in names] for a in names])
    step[names.index("}")] = np.eye(len(names))[names.index("}")]
    for _ in range(tokens_left):
        value = step @ value
    return float(value[names.index(last)])


def write_markov_model(path: Path) -> Path:
    """The chain as a dense Qwen3 with the tiny model's tokenizer."""
    tokenizer = build_tokenizer()
    vocabulary, width = tokenizer.get_vocab(), 128
    assert len(vocabulary) <= width
    config = Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=width,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config).float()
    logits = torch.full((len(vocabulary), width), float(np.log(NEVER)))
    for last, row in {**CHAIN, **STARTS}.items():
        for token, probability in row.items():
            logits[vocabulary[token], vocabulary[last]] = float(np.log(probability))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0 if "norm" in name else 0.0)
        model.model.embed_tokens.weight.copy_(torch.eye(len(vocabulary), width))
        model.lm_head.weight.copy_(logits / width**0.5)  # the last norm makes a one-hot of width**0.5
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def write_job(root: Path, problems: list[dict[str, str]], limit: int) -> None:
    """A Markov model in root/model, its problems.jsonl, and run.yaml for the transformers engine; `limit` in tokens."""
    model, train = write_markov_model(root / "model"), root / "problems.jsonl"
    train.write_text("".join(json.dumps(row) + "\n" for row in problems))
    config = {
        "run_dir": str(root / "run"),
        "seed": 3,
        "model": {"path": str(model)},
        "data": {"train": str(train), "max_prompt_length": 8},
        "rollout": {"engine": "transformers", "precision": "float32", "max_response_length": limit},
        "logging": {"progress": False},
    }
    (root / "run.yaml").write_text(yaml.safe_dump(config))
