"""The plan of an export, its parts written by one process, and targets that are refused, interrupted or left behind."""

import errno
import multiprocessing
import os
import shutil
from collections import namedtuple

import pytest
import torch

from megatron_rlvr.hf import ExportPlan, HFCheckpoint, PartWriter, Skeleton, WeightMap, read_model_spec
from megatron_rlvr.hf.byte_ranges import read_slices, whole, write_slices
from megatron_rlvr.hf.staging import check_target, partial_path, remove_partial, staged_directory
from megatron_rlvr.types import Place, UserError

from .checkpoints import CONFIGS, random_tensors, write_directory

MOE = CONFIGS["moe"]


@pytest.fixture
def source(tmp_path):
    return write_directory(tmp_path / "source", MOE, random_tensors(MOE), shards=2)


def contents(directory):
    return {file.name: file.read_bytes() for file in directory.iterdir()}


@pytest.mark.parametrize("run", [8, 6000])
def test_slices_are_read_and_written_where_they_lie(tmp_path, run):
    """Short runs are read with their gaps, long ones alone; both are tensor[slices]."""
    tensor = torch.randn(5, 4, run // 2).bfloat16()
    part = (slice(1, 4), slice(2, 3), slice(1, run // 2 - 1))
    file = tmp_path / "file"
    file.write_bytes(b"head" + tensor.view(torch.uint8).numpy().tobytes() + b"tail")
    with file.open("r+b", buffering=0) as handle:
        found, count = read_slices(handle.fileno(), 4, tuple(tensor.shape), tensor.dtype, part)
        assert torch.equal(found, tensor[part])
        assert count == (found.nbytes if run > 4096 else tensor[1:4].nbytes)
        assert write_slices(handle.fileno(), 4, tuple(tensor.shape), part, -found) == found.nbytes
    tensor[part] *= -1
    assert file.read_bytes() == b"head" + tensor.view(torch.uint8).numpy().tobytes() + b"tail"


def test_files_and_index_are_those_of_save_pretrained(tmp_path):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = dict(hidden_size=32, intermediate_size=40, num_hidden_layers=12, num_attention_heads=2, head_dim=16)
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=61, num_key_value_heads=1, **sizes)).bfloat16()
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "cut", max_shard_size="40KB")
    checkpoint = HFCheckpoint(tmp_path / "one")
    plan = ExportPlan.of(Skeleton.of(checkpoint), max_shard_bytes=40_000)
    (tmp_path / "ours").mkdir()
    plan.create(tmp_path / "ours")
    with PartWriter(plan, tmp_path / "ours") as writer:
        for name in checkpoint.names():
            writer.write(name, whole(checkpoint.shape(name)), checkpoint.read(name))
    assert writer.bytes_written == plan.tensor_bytes
    assert len(contents(tmp_path / "cut")) > 6
    assert contents(tmp_path / "ours") == contents(tmp_path / "cut")


def test_local_parts_undo_local_tensor(source):
    """For every tensor and rank of TP2, with vocabulary padding (45 rows become 46)."""
    tensors = random_tensors(MOE)
    weights = WeightMap(read_model_spec(source), vocab_multiple=2)
    found = {name: torch.full_like(tensor, float("nan")) for name, tensor in tensors.items()}
    for rank in range(2):
        place = Place(rank, 2, expert_tensor_rank=rank, expert_tensor_size=2)
        for name in weights.names():
            local = weights.local_tensor(name, lambda n, part: tensors[n][part], place)
            for hf_name, slices, values in weights.local_parts(name, local, place):
                found[hf_name][slices] = values
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor), name


Usage = namedtuple("Usage", "total used free")


def refusal(action):
    with pytest.raises(UserError) as error:
        action()
    message = str(error.value)
    assert "\n" not in message and message.endswith(".")
    return message


def test_a_full_disk_is_seen_before_anything_is_written(source, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9 - 5_000_000, 5_000_000))
    message = refusal(lambda: check_target(tmp_path / "out", source, 6_000_000))
    assert "0.01 GB" in message and str(tmp_path) in message
    partial_path(tmp_path / "out").mkdir()  # what a dead export left makes room for the next one
    (partial_path(tmp_path / "out") / "model.safetensors").write_bytes(bytes(1_500_000))
    check_target(tmp_path / "out", source, 6_000_000)


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("source", "stays as it is"),
        ("source/inside", "stays as it is"),
        (".", "stays as it is"),
        ("link", "stays as it is"),
        ("full", "not empty"),
        ("file", "no directory"),
        ("file/below", "not a writable directory"),
        ("dangling", "no directory"),
        ("n" * 255, "name too long"),
    ],
)
def test_bad_targets_are_refused(source, tmp_path, where, words):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").touch()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert words in refusal(lambda: check_target(tmp_path / where, source, 1))
    (tmp_path / "empty").mkdir()
    check_target(tmp_path / "empty", source, 1)
    check_target(tmp_path / "full", source, 1, overwrite=True)


def test_leftovers_of_a_killed_export_are_recognised(source, tmp_path):
    target = tmp_path / "out"
    partial_path(target).mkdir()
    (partial_path(target) / "old").touch()
    with staged_directory(target) as partial:
        (partial / "new").touch()
        assert "another process" in refusal(lambda: staged_directory(target).__enter__())
        remove_partial(target)  # as a second writer does that was refused
        assert partial.is_dir()
    assert [p.name for p in target.iterdir()] == ["new"]
    target.rename(tmp_path / ".out.replaced")  # killed between the two renames of a replacement
    assert "not empty" in refusal(lambda: check_target(target, source, 1))
    assert [p.name for p in target.iterdir()] == ["new"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source"]


def write_slowly(target, source, progress):
    """Export the source's tensors, reporting each; runs in a child that is going to be killed."""
    checkpoint = HFCheckpoint(source)
    plan = ExportPlan.of(Skeleton.of(checkpoint))
    with staged_directory(target) as partial:
        plan.create(partial)
        with PartWriter(plan, partial) as writer:
            for name in checkpoint.names():
                writer.write(name, whole(checkpoint.shape(name)), checkpoint.read(name))
                progress.send(name)
    progress.send("done")


def test_killed_at_any_time_the_target_is_absent_or_whole(source, tmp_path):
    context = multiprocessing.get_context("fork")
    target, count = tmp_path / "out", len(random_tensors(MOE))
    for reports in (1, count // 2, count, count, count + 1):
        receive, send = context.Pipe(duplex=False)
        child = context.Process(target=write_slowly, args=(target, source, send))
        child.start()
        for _ in range(reports):
            receive.recv()
        child.kill()
        child.join(timeout=30)
        assert not target.exists() or contents(target) == contents(source)
    assert contents(target) == contents(source)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source"]


def test_a_disk_that_fills_up_on_the_way_leaves_nothing(source, tmp_path, monkeypatch, one_rank):
    from megatron_rlvr.refresh import export_checkpoint

    checkpoint, spec = HFCheckpoint(source), read_model_spec(source)
    weights, before = WeightMap(spec), contents(source)

    class Model:
        place = Place()

        def owned_weights(self):
            for name in weights.names():
                yield name, weights.local_tensor(name, checkpoint.read, self.place)

    plan, real, count = ExportPlan.of(Skeleton.of(checkpoint)), os.pwrite, []

    def full(*arguments):
        count.append(arguments)
        if len(count) == 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        message = refusal(lambda: export_checkpoint(Model(), weights, plan, tmp_path / "out"))
    assert "No space left" in message and "out" in message
    assert [p.name for p in tmp_path.iterdir()] == ["source"] and contents(source) == before
    export_checkpoint(Model(), weights, plan, tmp_path / "out")
    assert contents(tmp_path / "out") == before


def test_a_mixed_dtype_names_the_tensor(tmp_path):
    tensors = random_tensors(MOE)
    tensors["model.layers.2.mlp.gate.weight"] = tensors["model.layers.2.mlp.gate.weight"].float()
    checkpoint = HFCheckpoint(write_directory(tmp_path, MOE, tensors))
    message = refusal(lambda: checkpoint.check_complete(read_model_spec(tmp_path)))
    assert "model.layers.2.mlp.gate.weight is float32" in message and "model.safetensors" in message


def test_a_skeleton_without_headers_is_refused(tmp_path):
    assert str(tmp_path) in refusal(lambda: Skeleton.read(tmp_path))
