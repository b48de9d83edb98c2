"""The comparison with transformers: right models pass in every layout, and every planted fault is named."""

import json
import shutil
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rlvr.hf import HFCheckpoint, WeightMap, layouts, read_model_spec
from megatron_rlvr.types import Place, UserError
from tests.hf.checkpoints import CONFIGS, fuse, random_tensors, write_directory
from tests.parallel.families import LLAMA3, write_family

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import verify_conversion
from verify_parameters import compare_parameters, compare_rotary, merge_findings

TP2, PP2, CP2 = ["tensor_parallel=2"], ["pipeline_parallel=2"], ["context_parallel=2"]
VPP2 = [*PP2, "virtual_pipeline=2"]
EP2, TP2_EP2 = ["expert_parallel=2", "data_parallel=2"], ["tensor_parallel=2", "expert_parallel=2"]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
FAMILIES = {
    "qwen3": ({"model_type": "qwen3", "head_dim": 16}, [TP2, PP2, CP2]),
    "qwen2": ({"model_type": "qwen2", "tie_word_embeddings": True}, [TP2, PP2, CP2]),
    "llama": (
        {"model_type": "llama", "head_dim": 16, "num_hidden_layers": 4, "rope_parameters": LLAMA3},
        [TP2, PP2, VPP2, CP2],
    ),
    "qwen3_moe": ({"model_type": "qwen3_moe", "head_dim": 16, **EXPERTS}, [TP2, PP2, EP2, TP2_EP2, CP2]),
}
CASES = [(name, " ".join(layout)) for name, (_, layouts_) in FAMILIES.items() for layout in layouts_]
MOE, TIED = CONFIGS["moe"], CONFIGS["tied"]
WHOLE = Place()
SWAPPED = "model.layers.1.mlp.experts.3.gate_proj.weight"


def arguments(model, *options):
    return verify_conversion.parser().parse_args([str(model), "--length", "30", *map(str, options)])


def spoiled_copies(root, model):
    """A copy whose layer 1 has gate and up of one expert swapped, and one with another rope_theta."""
    swapped, turned = root / "swapped", root / "turned"
    shutil.copytree(model, swapped)
    tensors = load_file(swapped / "model.safetensors")
    up = SWAPPED.replace("gate_proj", "up_proj")
    tensors[SWAPPED], tensors[up] = tensors[up], tensors[SWAPPED]
    save_file(tensors, swapped / "model.safetensors", metadata={"format": "pt"})
    shutil.copytree(model, turned)
    config = json.loads((turned / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 2e4
    (turned / "config.json").write_text(json.dumps(config))
    return swapped, turned


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """(model, layout) -> what the tool found, all in one launch of two ranks."""
    root, cases = tmp_path_factory.mktemp("verify"), {}

    def add(name, model, *options):
        (root / f"{name}_files").mkdir()
        for case in verify_conversion.prepare(arguments(model, *options), root / f"{name}_files"):
            cases[name, case["name"]] = case

    for name, (config, layouts_) in FAMILIES.items():
        write_family(root / name, config)
        add(name, root / name, *(word for layout in layouts_ for word in ("--layout", *layout)))
    for model in spoiled_copies(root, root / "qwen3_moe"):
        add(model.name, model, "--reference", root / "qwen3_moe", "--layout", *TP2_EP2)
    assert verify_conversion.launch(list(cases.values()), root, threads=1) == 0
    return {key: json.loads(Path(case["result"]).read_text()) for key, case in cases.items()}


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_every_family_agrees_with_transformers_in_every_layout(results, name, layout):
    result = results[name, layout]
    assert verify_conversion.faults(result, 1e-5) == []
    logits = result["probes"]["lm_head"]
    assert logits["max"] < 2e-5 and logits["mean"] < 1e-5 and logits["top1"] == 1
    layers = FAMILIES[name][0].get("num_hidden_layers", 2)
    assert len(result["probes"]) == 3 * layers + 3
    lines = verify_conversion.report(result, 1e-5)
    assert "top-1 equal 100.00%" in lines[1] and "no layer differs" in lines[2]


def test_a_difference_is_traced_to_tensor_and_layer(results):
    found = verify_conversion.faults(results["swapped", " ".join(TP2_EP2)], 1e-5)
    up = SWAPPED.replace("gate_proj", "up_proj")
    assert len(found) == 3
    assert any(text.startswith(f"{SWAPPED}: 32 of 32 rows differ") and f"it holds {up}" in text for text in found)
    assert any(text.startswith(f"{up}:") and f"it holds {SWAPPED}" in text for text in found)
    assert found[-1].startswith("model.layers.1.mlp: first divergence")


def test_another_rope_theta_is_named_and_first_seen_in_attention(results):
    found = verify_conversion.faults(results["turned", " ".join(TP2_EP2)], 1e-5)
    assert found[0].startswith("rope_theta:") and "20000" in found[0] and "10000" in found[0]
    assert found[1].startswith("model.layers.0.self_attn: first divergence") and len(found) == 2


def loaded(weights, read, place):
    """The parameters of one rank that holds all layers, as the package's weight map cuts them."""
    return {name: weights.local_tensor(name, read, place) for name in weights.local_names(place)}


def findings(tmp_path, read=None, places=(WHOLE,)):
    """What the comparison says of the experts' model loaded at `places` with `read`."""
    tensors = random_tensors(MOE)
    path = write_directory(tmp_path / "model", MOE, tensors)
    spec, checkpoint = read_model_spec(path), HFCheckpoint(path)
    weights = WeightMap(spec, vocab_multiple=places[0].tensor_size)
    read = (lambda name, slices: checkpoint.read(read_name(name), slices)) if (read_name := read) else checkpoint.read
    found = [compare_parameters(loaded(weights, read, p), spec, p, tensors.__getitem__) for p in places]
    return {name: text for name, text in merge_findings(found, tensors).items() if text}


def test_the_weight_map_agrees_with_the_layouts_stated_here(tmp_path):
    places = [Place(t, 2, e, 2, t, 2) for t in range(2) for e in range(2)]
    assert findings(tmp_path, places=places) == {}


def test_wrong_interleaving_of_q_k_and_v(tmp_path, monkeypatch):
    monkeypatch.setattr(layouts.GroupedQkv, "join", lambda self, parts, shapes, size: torch.cat(list(parts)))
    found = findings(tmp_path)
    assert {name.split(".")[-2] for name in found} == {"q_proj", "k_proj", "v_proj"} and len(found) == 9
    assert "rows differ" in found["model.layers.1.self_attn.q_proj.weight"]


def test_interleaving_by_head_instead_of_group(tmp_path, monkeypatch):
    """The right rows of q in the wrong order of heads."""
    right = layouts.GroupedQkv.join

    def wrong(self, parts, shapes, size):
        q = parts[0].reshape(2, 2, 6, -1).transpose(0, 1).reshape(parts[0].shape)
        return right(self, [q, *parts[1:]], shapes, size)

    monkeypatch.setattr(layouts.GroupedQkv, "join", wrong)
    found = findings(tmp_path)
    assert set(found) == {f"model.layers.{i}.self_attn.q_proj.weight" for i in range(3)}
    assert "the same rows in another order" in found["model.layers.0.self_attn.q_proj.weight"]


def swap(one, other):
    return lambda name: name.replace(one, "@").replace(other, one).replace("@", other)


def test_gate_and_up_swapped(tmp_path):
    found = findings(tmp_path, swap("gate_proj", "up_proj"))
    assert len(found) == 2 * (1 + 2 * 4)
    assert "it holds model.layers.1.mlp.up_proj.weight" in found["model.layers.1.mlp.gate_proj.weight"]


def test_experts_permuted(tmp_path):
    found = findings(tmp_path, swap("experts.1.", "experts.2."))
    assert len(found) == 2 * 2 * 3
    name = "model.layers.2.mlp.experts.1.down_proj.weight"
    assert "it holds model.layers.2.mlp.experts.2.down_proj.weight" in found[name]


@pytest.mark.parametrize("lost", ["mlp.experts.2.", "self_attn.q_norm."])
def test_parameters_that_the_model_lacks(tmp_path, monkeypatch, lost):
    whole = WeightMap.local_names
    dropped = {"mlp.experts.2.": ".local_experts.2.", "self_attn.q_norm.": "q_layernorm"}[lost]
    monkeypatch.setattr(WeightMap, "local_names", lambda self, p: [n for n in whole(self, p) if dropped not in n])
    found = findings(tmp_path)
    assert found and all(lost in name and "no rank holds" in text for name, text in found.items())


def test_vocabulary_padding_must_be_zero(tmp_path):
    tensors = random_tensors(MOE)
    spec = read_model_spec(write_directory(tmp_path, MOE, tensors))
    rows = torch.cat([tensors["lm_head.weight"], torch.ones(1, 24).bfloat16()])
    found = compare_parameters({"output_layer.weight": rows}, spec, WHOLE, tensors.__getitem__)
    assert "lm_head.weight: 1 of 1 rows differ" in found["lm_head.weight"]


def test_a_copy_of_the_tied_embedding_that_went_its_own_way(tmp_path):
    tensors = random_tensors(TIED)
    spec = read_model_spec(write_directory(tmp_path, TIED, tensors))
    head = tensors["model.embed_tokens.weight"].clone()
    head[7] += 1
    found = compare_parameters({"output_layer.weight": head}, spec, WHOLE, tensors.__getitem__)
    assert "1 of 45 rows differ, from row 7 on" in found["model.embed_tokens.weight"]


@pytest.mark.parametrize("theta", [999.0, 1000.0])
def test_rotary_frequencies_of_another_theta(theta):
    exponents = torch.arange(0, 64, 2, dtype=torch.float32) / 64
    text = compare_rotary(theta**-exponents, 1000.0**-exponents)
    assert (
        text.startswith("rope_theta:") and "999 in Megatron and 1000 in transformers" in text
        if theta < 1000
        else not text
    )


SHARD = "model-00002-of-00003.safetensors"
IN_SHARD = tuple(random_tensors(MOE))[1::3]
Q_NORM = "model.layers.1.self_attn.q_norm.weight"


def untie(path, tensors):
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"][3] += 1
    write_directory(path, TIED, tensors)


FILE_FAULTS = {
    "expert dropped": (
        lambda path, t: write_directory(path, MOE, {n: x for n, x in t.items() if "experts.3.up" not in n}),
        "model.layers.0.mlp.experts.3.up_proj.weight",
    ),
    "q norm missing": (
        lambda path, t: write_directory(
            path, MOE, {n: x for n, x in t.items() if n != "model.layers.1.self_attn.q_norm.weight"}
        ),
        "model.layers.1.self_attn.q_norm.weight",
    ),
    "head untied": (lambda path, t: untie(path, random_tensors(TIED)), "lm_head.weight"),
    "head missing": (
        lambda path, t: write_directory(path, MOE, {n: x for n, x in t.items() if n != "lm_head.weight"}),
        "lm_head.weight",
    ),
    "index names an absent file": (
        lambda path, t: (write_directory(path, MOE, t, shards=3) / SHARD).unlink(),
        IN_SHARD,
    ),
    "shard truncated": (
        lambda path, t: (write_directory(path, MOE, t, shards=3) / SHARD).open("rb+").truncate(5000),
        IN_SHARD,
    ),
    "dtypes mixed": (
        lambda path, t: write_directory(path, MOE, t | {"model.norm.weight": t["model.norm.weight"].float()}),
        "model.norm.weight",
    ),
    "fused expert too few": (
        lambda path, t: write_directory(
            path,
            MOE,
            {n: x[:3] if n == "model.layers.2.mlp.experts.down_proj" else x for n, x in fuse(MOE, t).items()},
        ),
        "model.layers.2.mlp.experts.3.down_proj.weight",
    ),
}


@pytest.mark.parametrize("fault", FILE_FAULTS)
def test_faults_of_the_files_name_the_tensor(tmp_path, capsys, fault):
    plant, named = FILE_FAULTS[fault]
    plant(tmp_path / "model", random_tensors(MOE))
    assert verify_conversion.main([str(tmp_path / "model")]) == 2
    message = capsys.readouterr().err.strip()
    assert "\n" not in message and message.endswith(".")
    if named is IN_SHARD:
        assert SHARD in message and any(f"{name} " in message for name in named)
    else:
        assert named in message


def test_tokens_are_read_padded_and_refused(tmp_path):
    file = tmp_path / "tokens.json"
    file.write_text("[[1, 2, 3], [4]]")
    tokens, real = verify_conversion.read_tokens(Namespace(tokens=file), 45, 4)
    assert tokens.tolist() == [[1, 2, 3, 0], [4, 0, 0, 0]] and real.sum(1).tolist() == [3, 1]
    for content, word in (
        ("[[1, 45]]", "45"),
        ("[]", "no sequences"),
        ("{", "JSON"),
        ("[[]]", "None"),
        ("[7]", "None"),
    ):
        file.write_text(content)
        with pytest.raises(UserError, match=word):
            verify_conversion.read_tokens(Namespace(tokens=file), 45, 4)


@pytest.mark.parametrize(
    ("option", "value", "word"),
    [
        ("--sequences", "0", "--sequences is 0"),
        ("--length", "-1", "--length is -1"),
        ("--threads", "0", "--threads is 0"),
        ("--tolerance", "nan", "--tolerance is nan"),
        ("--device", "tpu", "--device is tpu"),
        ("--reference", "other", "vocab_size"),
    ],
)
def test_options_that_cannot_work_are_refused(tmp_path, capsys, monkeypatch, option, value, word):
    monkeypatch.chdir(tmp_path)
    path = write_directory(tmp_path / "model", MOE, random_tensors(MOE))
    wider = MOE | {"vocab_size": MOE["vocab_size"] + 2}
    write_directory(tmp_path / "other", wider, random_tensors(wider))
    assert verify_conversion.main([str(path), option, value]) == 2
    message = capsys.readouterr().err.strip()
    assert word in message and "\n" not in message


def test_layouts_that_cannot_work_are_refused(tmp_path, capsys):
    path = write_directory(tmp_path / "model", MOE, random_tensors(MOE))
    for layout, word in ((["tensor_parallel=4"], "tensor_parallel"), (["tensor=2"], "tensor"), (["lr"], "lr")):
        assert verify_conversion.main([str(path), "--layout", *layout]) == 2
        message = capsys.readouterr().err.strip()
        assert word in message and "\n" not in message
