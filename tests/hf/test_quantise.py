"""FP8 directories: what is quantised, what stays, what transformers makes of them, and every refusal."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rlvr.cli import main
from megatron_rlvr.hf import HFCheckpoint, read_model_spec
from megatron_rlvr.hf.fp8 import quantise_block
from megatron_rlvr.hf.modelopt_export import calibration_tokens, check_scales
from megatron_rlvr.hf.quantise import is_quantised, quantise_fp8_block
from megatron_rlvr.types import UserError

from .checkpoints import CONFIGS, fuse, random_tensors, write_directory

MOE = CONFIGS["moe"]
STAYS = ("embed_tokens", "lm_head", "norm", "mlp.gate.weight")


@pytest.mark.parametrize("fused", [False, True])
def test_projections_become_fp8_and_all_else_stays(tmp_path, fused):
    tensors = random_tensors(MOE)
    source = write_directory(tmp_path / "source", MOE, fuse(MOE, tensors) if fused else tensors, shards=2)
    quantise_fp8_block(source, tmp_path / "out", max_shard_bytes=4000)
    written = HFCheckpoint(tmp_path / "out")
    scales = {name for name in written.names() if name.endswith(".weight_scale_inv")}
    assert set(written.names()) - scales == set(tensors)
    for name, tensor in tensors.items():
        if any(part in name for part in STAYS):
            assert written.read(name).dtype == torch.bfloat16 and torch.equal(written.read(name), tensor)
            continue
        weight, scale = quantise_block(tensor)
        assert torch.equal(written.read(name).view(torch.uint8), weight.view(torch.uint8)), name
        assert torch.equal(written.read(f"{name}_scale_inv"), scale)
        scales.remove(f"{name}_scale_inv")
    assert not scales
    assert len(written.files()) > 1 and (tmp_path / "out" / "tokenizer.json").is_file()


def test_config_names_the_quantisation_and_is_refused_for_training(tmp_path):
    source = write_directory(tmp_path / "source", MOE, random_tensors(MOE))
    quantise_fp8_block(source, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.pop("quantization_config") == {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "model.layers.2.mlp.gate"],
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }
    assert config == MOE
    with pytest.raises(UserError, match="quantization_config"):
        read_model_spec(tmp_path / "out")


def test_float32_is_quantised_from_float32_and_the_rest_becomes_bf16(tmp_path):
    tensors = random_tensors(MOE, torch.float32)
    source = write_directory(tmp_path / "source", MOE | {"dtype": "float32"}, tensors)
    quantise_fp8_block(source, tmp_path / "out", pow2=True)
    written = HFCheckpoint(tmp_path / "out")
    name = "model.layers.1.mlp.down_proj.weight"
    weight, scale = quantise_block(tensors[name], pow2=True)
    assert torch.equal(written.read(name).view(torch.uint8), weight.view(torch.uint8))
    assert torch.equal(written.read(f"{name}_scale_inv"), scale)
    assert torch.equal(scale.log2(), scale.log2().round())
    assert torch.equal(written.read("lm_head.weight"), tensors["lm_head.weight"].bfloat16())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_transformers_builds_the_same_modules_from_the_config(tmp_path):
    """Its own FP8 layers, on the meta device: the same names, shapes and dtypes as in the files, nothing else."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear
    from transformers.quantizers import AutoQuantizationConfig

    dense = CONFIGS["dense"] | {"hidden_size": 140, "intermediate_size": 300}
    quantise_fp8_block(write_directory(tmp_path / "source", dense, random_tensors(dense)), tmp_path / "out")
    config = AutoConfig.from_pretrained(tmp_path / "out")
    described = AutoQuantizationConfig.from_dict(config.quantization_config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = replace_with_fp8_linear(model, described.modules_to_not_convert, described, pre_quantized=True)
    expected = {name: (t.dtype, tuple(t.shape)) for name, t in model.state_dict().items()}
    written = HFCheckpoint(tmp_path / "out")
    assert {name: (written.dtype(name), written.shape(name)) for name in written.names()} == expected


def refusal(capsys, *arguments):
    """What the command line says, in one line, and that it exits with 2."""
    assert main(["convert", "quantise", *map(str, arguments)]) == 2
    message = capsys.readouterr().err.strip()
    assert "\n" not in message and message.endswith((".", "--help"))
    return message


def test_a_weight_that_is_not_finite_is_named_and_nothing_is_left(tmp_path, capsys):
    tensors = random_tensors(MOE)
    name = "model.layers.2.mlp.experts.3.up_proj.weight"
    tensors[name][3, 5] = torch.nan
    source = write_directory(tmp_path / "source", MOE, tensors)
    assert name in refusal(capsys, "--to", "fp8-block", source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_refusals_of_the_command_line(tmp_path, capsys):
    source = write_directory(tmp_path / "source", MOE, random_tensors(MOE))
    out = tmp_path / "out"
    assert main(["convert", "quantise", "--to", "fp8-block", str(source), str(out)]) == 0
    assert "already exists" in refusal(capsys, "--to", "fp8-block", source, out)
    assert "quantization_config" in refusal(capsys, "--to", "fp8-block", out, tmp_path / "again")
    assert "nowhere" in refusal(capsys, "--to", "fp8-block", tmp_path / "nowhere", tmp_path / "again")
    assert "--prompts" in refusal(capsys, "--to", "fp8-tensor", source, tmp_path / "again")
    assert "--prompts" in refusal(capsys, "--to", "fp8-block", "--prompts", "p", source, tmp_path / "again")
    assert "--pow2" in refusal(capsys, "--to", "fp8-tensor", "--prompts", "p", "--pow2", source, tmp_path / "again")
    assert "fp4" in refusal(capsys, "--to", "fp4", source, tmp_path / "again")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_calibration_prompts_are_checked(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"problem": "1 + 1"}\n{"question": "2 + 2"}\n')
    with pytest.raises(UserError, match=r"prompts\.jsonl:2 has no text under 'problem'"):
        calibration_tokens(tmp_path, prompts, "problem", 2)
    prompts.write_text("\n")
    with pytest.raises(UserError, match="no prompts"):
        calibration_tokens(tmp_path, prompts, "problem", 2)


@pytest.mark.parametrize("spoil", [0.0, float("nan"), None])
def test_scales_that_cannot_be_used_are_named(tmp_path, spoil):
    tensors = random_tensors(CONFIGS["dense"])
    source = HFCheckpoint(write_directory(tmp_path / "source", CONFIGS["dense"], tensors))
    named = {name.removesuffix("weight"): t for name, t in tensors.items() if is_quantised(name)}
    scales = {f"{name}{kind}": torch.tensor(0.01) for name in named for kind in ("weight_scale", "input_scale")}
    (tmp_path / "out").mkdir()
    save_file(tensors | scales, tmp_path / "out" / "model.safetensors")
    check_scales(tmp_path / "out", source)
    bad = "model.layers.1.mlp.up_proj.input_scale"
    scales.pop(bad)
    if spoil is not None:
        scales[bad] = torch.tensor(spoil)
    save_file(tensors | scales, tmp_path / "out" / "model.safetensors")
    with pytest.raises(UserError, match=bad):
        check_scales(tmp_path / "out", source)


@pytest.mark.skipif(importlib.util.find_spec("modelopt") is not None, reason="ModelOpt is installed")
def test_without_modelopt_the_command_says_what_to_install(tmp_path, capsys):
    source = write_directory(tmp_path / "source", MOE, random_tensors(MOE))
    (tmp_path / "prompts.jsonl").write_text('{"problem": "1 + 1"}\n')
    arguments = ("--to", "fp8-tensor", "--prompts", tmp_path / "prompts.jsonl", source, tmp_path / "out")
    assert "requirements-modelopt.txt" in refusal(capsys, *arguments)
    assert not (tmp_path / "out").exists()


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("modelopt") is None, reason="needs requirements-modelopt.txt")
def test_modelopt_gives_scales_to_experts_that_no_prompt_visits(tmp_path):
    root = Path(__file__).resolve().parents[2]
    sizes = ["--hidden", "256", "--intermediate", "256", "--moe-intermediate", "128", "--layers", "2"]
    make = [sys.executable, str(root / "tools" / "make_tiny_model.py"), str(tmp_path / "source"), *sizes]
    subprocess.run(make, check=True, capture_output=True)
    (tmp_path / "prompts.jsonl").write_text('{"problem": "7"}\n')  # one token visits 2 of 8 experts
    command = ["-m", "megatron_rlvr", "convert", "quantise", "--to", "fp8-tensor", "--prompts"]
    paths = [str(tmp_path / name) for name in ("prompts.jsonl", "source", "out")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, *command, *paths], capture_output=True, text=True, timeout=300, cwd=root, env=environment
    )
    assert done.returncode == 0, done.stderr
    written, source = load_file(tmp_path / "out" / "model.safetensors"), HFCheckpoint(tmp_path / "source")
    for name in filter(is_quantised, source.names()):
        scale = written[f"{name}_scale"]
        assert written[name].dtype == torch.float8_e4m3fn and torch.isfinite(scale) and scale > 0
        error = (written[name].float() * scale - source.read(name).float()).abs().max()
        assert error <= source.read(name).abs().max() / 16
    for name in ("lm_head.weight", "model.embed_tokens.weight", "model.layers.0.mlp.gate.weight"):
        assert torch.equal(written[name], source.read(name).bfloat16())
    quantisation = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())["quantization"]
    assert quantisation["quant_algo"] == "FP8" and "lm_head" in quantisation["exclude_modules"]
    assert (tmp_path / "out" / "tokenizer.json").is_file()
