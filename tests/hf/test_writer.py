import json
import multiprocessing
import time

import pytest
import torch

from megatron_rlvr.hf import HFCheckpoint, read_model_spec, write_checkpoint
from megatron_rlvr.types import UserError

from .checkpoints import CONFIGS, fuse, random_tensors, write_directory

MOE = CONFIGS["moe"]


def contents(directory):
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def assert_holds(directory, tensors):
    checkpoint = HFCheckpoint(directory)
    assert checkpoint.stored_shapes() == {name: tuple(t.shape) for name, t in tensors.items()}
    for name, tensor in tensors.items():
        assert checkpoint.dtype(name) == tensor.dtype
        assert torch.equal(checkpoint.read(name), tensor), name


@pytest.mark.parametrize("max_shard_bytes", [4_000, 10**9])
def test_round_trip_keeps_tensors_and_companions(config, checkpoint_dir, tmp_path, max_shard_bytes):
    new = random_tensors(config, seed=1)
    target = tmp_path / "out" / "trained"
    write_checkpoint(target, checkpoint_dir, reversed(new.items()), max_shard_bytes=max_shard_bytes)
    assert_holds(target, new)
    HFCheckpoint(target).check_complete(read_model_spec(target))
    for name in ("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (target / name).read_bytes() == (checkpoint_dir / name).read_bytes()
    index = target / "model.safetensors.index.json"
    assert index.exists() == (max_shard_bytes < 10**9)
    if index.exists():
        assert json.loads(index.read_text())["metadata"]["total_size"] == sum(t.nbytes for t in new.values())
        assert max(f.stat().st_size for f in target.glob("*.safetensors")) < 2 * max_shard_bytes
    assert [p.name for p in target.parent.iterdir()] == ["trained"]
    assert (target / "config.json").stat().st_mode & 0o044 == next(target.glob("*.safetensors")).stat().st_mode & 0o044


def test_unchanged_tensors_give_the_same_bytes(config, checkpoint_dir, tmp_path):
    source = HFCheckpoint(checkpoint_dir)
    write_checkpoint(tmp_path / "copy", checkpoint_dir, ((name, source.read(name)) for name in source.names()))
    assert contents(tmp_path / "copy") == contents(checkpoint_dir)


def test_fused_experts_are_written_fused(tmp_path):
    old, new = random_tensors(MOE), random_tensors(MOE, seed=1)
    source = write_directory(tmp_path / "source", MOE, fuse(MOE, old))
    write_checkpoint(tmp_path / "out", source, new.items())
    assert_holds(tmp_path / "out", fuse(MOE, new))


def test_a_head_stored_beside_a_tied_embedding_is_repeated(tmp_path):
    config = CONFIGS["tied"]
    old, new = random_tensors(config), random_tensors(config, seed=1)
    head = {"lm_head.weight": old["model.embed_tokens.weight"].clone()}
    source = write_directory(tmp_path / "source", config, old | head)
    write_checkpoint(tmp_path / "out", source, new.items())
    assert_holds(tmp_path / "out", new | {"lm_head.weight": new["model.embed_tokens.weight"]})


def test_dtype_is_converted_and_named_in_the_config(tmp_path):
    source = write_directory(tmp_path / "source", MOE, random_tensors(MOE))
    new = random_tensors(MOE, torch.float32, seed=1)
    write_checkpoint(tmp_path / "wide", source, new.items(), dtype=torch.float32)
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["dtype"] == "float32"
    assert_holds(tmp_path / "wide", new)
    write_checkpoint(tmp_path / "narrow", source, new.items(), dtype=torch.bfloat16)
    assert (tmp_path / "narrow" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert_holds(tmp_path / "narrow", {name: t.bfloat16() for name, t in new.items()})


def test_slices_of_one_tensor_and_parameters_can_be_written(tmp_path):
    source = write_directory(tmp_path / "source", MOE, random_tensors(MOE))
    new = {n: torch.nn.Parameter(t.float().t()).t() for n, t in random_tensors(MOE, seed=1).items()}
    both = torch.cat([new[f"model.layers.1.mlp.{x}_proj.weight"] for x in ("gate", "up")])
    for x, half in zip(("gate", "up"), both.chunk(2), strict=True):
        new[f"model.layers.1.mlp.{x}_proj.weight"] = half
    write_checkpoint(tmp_path / "out", source, new.items())
    assert_holds(tmp_path / "out", {n: t.detach() for n, t in new.items()})


def test_existing_target_is_refused_then_replaced_whole(tmp_path):
    source = write_directory(tmp_path / "source", MOE, random_tensors(MOE))
    target = write_directory(tmp_path / "out", MOE, random_tensors(MOE), shards=5)
    before, new = contents(target), random_tensors(MOE, seed=1)
    with pytest.raises(UserError, match=r"out already exists"):
        write_checkpoint(target, source, new.items())
    assert contents(target) == before
    write_checkpoint(target, source, new.items(), overwrite=True)
    assert_holds(target, new)
    assert sorted(p.name for p in target.glob("*.safetensors*")) == ["model.safetensors"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source"]


@pytest.mark.parametrize("where", ["source", "source/new", "source/../source/a/b", "."])
def test_the_source_is_never_touched(tmp_path, where):
    source = write_directory(tmp_path / "all" / "source", MOE, random_tensors(MOE), shards=2)
    before = contents(source)
    with pytest.raises(UserError, match=r"in or around the source .*source, which stays as it is"):
        write_checkpoint(tmp_path / "all" / where, source, random_tensors(MOE).items(), overwrite=True)
    assert contents(source) == before and [p.name for p in tmp_path.iterdir()] == ["all"]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda t: t.pop("model.norm.weight"), r"model\.norm\.weight .* never written"),
        (lambda t: t.update({"other.weight": torch.zeros(1)}), r"other\.weight"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(7)}), r"model\.norm\.weight \[7\]"),
    ],
)
def test_a_wrong_stream_leaves_nothing_behind(tmp_path, spoil, words):
    source = write_directory(tmp_path / "source", MOE, random_tensors(MOE))
    new = random_tensors(MOE, seed=1)
    spoil(new)
    with pytest.raises(ValueError, match=words):
        write_checkpoint(tmp_path / "out", source, new.items())
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_incomplete_fused_experts_are_refused(tmp_path):
    tensors = random_tensors(MOE)
    source = write_directory(tmp_path / "source", MOE, fuse(MOE, tensors))
    lost = "model.layers.2.mlp.experts.1.up_proj.weight"
    with pytest.raises(ValueError, match=lost):
        write_checkpoint(tmp_path / "out", source, ((n, t) for n, t in tensors.items() if n != lost))


def write_slowly(target, source, progress):
    """Write the source's tensors plus one, reporting each; runs in a child that is going to be killed."""
    checkpoint = HFCheckpoint(source)

    def stream():
        for name in checkpoint.names():
            progress.send(name)
            time.sleep(0.002)
            yield name, checkpoint.read(name) + 1

    write_checkpoint(target, source, stream(), max_shard_bytes=4000, overwrite=True)
    progress.send("done")


def kill_after(reports, target, source):
    """SIGKILL the writer a little after that many reports; True when it said that it was done."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=write_slowly, args=(target, source, send))
    child.start()
    send.close()
    seen = [receive.recv() for _ in range(reports)]
    time.sleep(0.0005 * (reports % 7))
    child.kill()
    child.join(timeout=30)
    while receive.poll():
        try:
            seen.append(receive.recv())
        except EOFError:
            break
    return seen[-1] == "done"


def test_killed_at_any_time_the_target_is_absent_or_whole(tmp_path):
    tensors = random_tensors(MOE)
    source = write_directory(tmp_path / "source", MOE, tensors)
    target, count = tmp_path / "out", len(tensors)
    for reports in (1, 2, count // 2, count - 1, *[count] * 10, count + 1):
        finished = kill_after(reports, target, source)
        assert finished <= target.exists()
        if target.exists():
            assert_holds(target, {name: t + 1 for name, t in tensors.items()})
    assert finished
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source"]
