import json
import struct

import pytest
import torch
from safetensors.torch import save_file

from megatron_rlvr.hf import HFCheckpoint, read_model_spec
from megatron_rlvr.types import UserError

from .checkpoints import CONFIGS, fuse, random_tensors, write_directory

MOE = CONFIGS["moe"]
INDEX = "model.safetensors.index.json"


def refusal(action):
    """The message of the UserError that `action` raises: one sentence."""
    with pytest.raises(UserError) as error:
        action()
    message = str(error.value)
    assert "\n" not in message and message.endswith(".")
    return message


@pytest.mark.parametrize("shards", [1, 3])
def test_names_shapes_dtypes_and_slices(tmp_path, shards):
    tensors = random_tensors(MOE)
    checkpoint = HFCheckpoint(write_directory(tmp_path, MOE, tensors, shards))
    assert sorted(checkpoint.names()) == sorted(tensors)
    name = "model.layers.0.self_attn.o_proj.weight"
    assert checkpoint.shape(name) == (24, 24) and checkpoint.dtype(name) == torch.bfloat16
    assert torch.equal(checkpoint.read(name), tensors[name])
    assert torch.equal(checkpoint.read(name, (slice(0, 24), slice(6, 12))), tensors[name][:, 6:12])
    assert checkpoint.read(name, (slice(24, 24), slice(0, 24))).shape == (0, 24)
    checkpoint.check_complete(read_model_spec(tmp_path))


def test_fused_experts_read_like_single_ones(tmp_path):
    tensors = random_tensors(MOE)
    checkpoint = HFCheckpoint(write_directory(tmp_path, MOE, fuse(MOE, tensors), shards=2))
    assert sorted(checkpoint.names()) == sorted(tensors)
    assert checkpoint.stored_shapes()["model.layers.0.mlp.experts.gate_up_proj"] == (4, 16, 24)
    for name, tensor in tensors.items():
        assert checkpoint.shape(name) == tuple(tensor.shape) and checkpoint.dtype(name) == torch.bfloat16
        assert torch.equal(checkpoint.read(name), tensor), name
    part = (slice(4, 8), slice(3, 7))
    for projection in ("gate", "up"):
        name = f"model.layers.2.mlp.experts.3.{projection}_proj.weight"
        assert torch.equal(checkpoint.read(name, part), tensors[name][part])
    checkpoint.check_complete(read_model_spec(tmp_path))


def test_a_tied_model_may_store_its_head(tmp_path):
    tensors = random_tensors(CONFIGS["tied"])
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    checkpoint = HFCheckpoint(write_directory(tmp_path, CONFIGS["tied"], tensors))
    checkpoint.check_complete(read_model_spec(tmp_path))


@pytest.mark.parametrize(
    ("lost", "name"),
    [
        (lambda n: ".experts.2." in n, "model.layers.0.mlp.experts.2.gate_proj.weight"),
        (lambda n: "q_norm" in n, "model.layers.0.self_attn.q_norm.weight"),
        (lambda n: n == "lm_head.weight", "lm_head.weight"),
    ],
)
def test_incomplete_checkpoints_name_the_first_lost_tensor(tmp_path, lost, name):
    tensors = {n: t for n, t in random_tensors(MOE).items() if not lost(n)}
    checkpoint = HFCheckpoint(write_directory(tmp_path, MOE, tensors))
    assert name in refusal(lambda: checkpoint.check_complete(read_model_spec(tmp_path)))


def test_unknown_tensors_and_wrong_shapes_are_named(tmp_path):
    tensors = random_tensors(MOE) | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(24)}
    checkpoint = HFCheckpoint(write_directory(tmp_path / "a", MOE, tensors))
    spec = read_model_spec(tmp_path / "a")
    assert "model.layers.0.self_attn.q_proj.bias" in refusal(lambda: checkpoint.check_complete(spec))
    tensors = random_tensors(MOE) | {"model.layers.2.mlp.gate.weight": torch.zeros(8, 24)}
    checkpoint = HFCheckpoint(write_directory(tmp_path / "b", MOE, tensors))
    message = refusal(lambda: checkpoint.check_complete(spec))
    assert "model.layers.2.mlp.gate.weight" in message and "[8, 24]" in message and "[4, 24]" in message


def test_reading_an_absent_tensor_names_it(tmp_path):
    checkpoint = HFCheckpoint(write_directory(tmp_path, MOE, random_tensors(MOE)))
    assert "model.layers.7.mlp.gate.weight" in refusal(lambda: checkpoint.read("model.layers.7.mlp.gate.weight"))


def test_directory_without_safetensors(tmp_path):
    assert "model.safetensors" in refusal(lambda: HFCheckpoint(tmp_path))
    assert "nowhere" in refusal(lambda: HFCheckpoint(tmp_path / "nowhere"))


def test_shard_that_the_index_names_is_missing(tmp_path):
    write_directory(tmp_path, MOE, random_tensors(MOE), shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    message = refusal(lambda: HFCheckpoint(tmp_path))
    assert "model-00002-of-00003.safetensors" in message and "model." in message


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated_file(tmp_path, keep):
    write_directory(tmp_path, MOE, random_tensors(MOE))
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert "model.safetensors" in refusal(lambda: HFCheckpoint(tmp_path))


def test_truncated_data_names_the_last_tensor(tmp_path):
    write_directory(tmp_path, MOE, random_tensors(MOE))
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    last = "model.norm.weight"  # safetensors orders tensors of one dtype by name
    assert last in refusal(lambda: HFCheckpoint(tmp_path))


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "F99"},
        {"shape": [3]},
        {"data_offsets": [0, 7]},
        {"data_offsets": None},
    ],
)
def test_inconsistent_header_names_the_tensor(tmp_path, change):
    save_file({"a.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    header = {"a.weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | change}
    raw = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(8))
    assert "a.weight" in refusal(lambda: HFCheckpoint(tmp_path))


def test_header_that_is_not_json(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 4) + b"\xff\xfe{}")
    assert "model.safetensors" in refusal(lambda: HFCheckpoint(tmp_path))


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda m: m.update({"extra.weight": "model-00001-of-00003.safetensors"}), ("extra.weight", "lacks")),
        (lambda m: m.pop("model.norm.weight"), ("model.norm.weight", "index does not")),
        (lambda m: m.update({"model.norm.weight": "../elsewhere.safetensors"}), ("model.norm.weight", "../elsewhere")),
    ],
)
def test_index_and_shards_disagree(tmp_path, edit, words):
    write_directory(tmp_path, MOE, random_tensors(MOE), shards=3)
    index = json.loads((tmp_path / INDEX).read_text())
    edit(index["weight_map"])
    (tmp_path / INDEX).write_text(json.dumps(index))
    message = refusal(lambda: HFCheckpoint(tmp_path))
    for word in words:
        assert word in message


@pytest.mark.parametrize("content", ["{}", "[]", '{"weight_map": ["model.norm.weight"]}', '{"weight_map": null}'])
def test_broken_index(tmp_path, content):
    write_directory(tmp_path, MOE, random_tensors(MOE), shards=3)
    (tmp_path / INDEX).write_text(content)
    assert INDEX in refusal(lambda: HFCheckpoint(tmp_path))
