"""Job scripts without a cluster: profiles, templates, secrets, placement, and what the shell says."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from launch.cluster import ClusterProfile, expanded, load_profile
from launch.follow import ended_code
from launch.git_state import git_state
from launch.jobs import KINDS, Request, sweep_runs, variables
from launch.render import TEMPLATES, Placement, place, render
from launch.secrets import refuse_secrets, refuse_secrets_in_text
from launch.slurm import main
from launch.slurm_task import rank_environment
from launch.submission import JobState
from megatron_rlvr.config.load import load_config
from megatron_rlvr.config.tree import RunConfig
from megatron_rlvr.types import UserError

CLUSTERS = sorted((TEMPLATES / "clusters").glob("*.yaml"))
TOKEN = "hf_" + "A1b2C3d4E5f6G7h8I9j0"


def _run_yaml(tmp_path: Path, **sections) -> Path:
    tree = {
        "name": "a run",
        "run_dir": str(tmp_path / "run"),
        "model": {"path": str(tmp_path / "a model")},
        "data": {"train": str(tmp_path / "data.jsonl")},
        "actor": {"tensor_parallel": 2, "data_parallel": 8},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(tree | sections))
    return path


def _profile(**values) -> ClusterProfile:
    return ClusterProfile.model_validate({"name": "here", "runtime": {"path": "/opt/env"}} | values)


def _script(kind: str, config: RunConfig, profile: ClusterProfile, **request) -> str:
    asked = Request(kind, config, profile, **request)
    runs = sweep_runs(asked) if kind == "sweep" else [asked.run_config]
    return render(KINDS[kind][0], variables(asked, runs))


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return load_config(_run_yaml(tmp_path))


# Scripts


@pytest.mark.parametrize("runtime", ["venv", "pyxis", "apptainer"])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_script_is_good_shell_in_every_runtime(
    tmp_path: Path, config: RunConfig, kind: str, runtime: str
) -> None:
    profile = _profile(runtime={"kind": runtime, "path": "/images/a b", "mounts": ["/a:/b", "$HOME:/home"]})
    script = tmp_path / "job.sbatch"
    script.write_text(_script(kind, config, profile, sweep=("seed=1,2", "loss.name=grpo,respo"), target=tmp_path / "o"))
    subprocess.run(["bash", "-n", script], check=True)
    if shutil.which("shellcheck"):
        done = subprocess.run(["shellcheck", "--severity=warning", script], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_the_profiles_that_we_ship_load_and_render(path: Path, config: RunConfig) -> None:
    script = _script("train", config, load_profile(path))
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=8\n#SBATCH --gpus-per-node=8\n" in script


def test_a_profile_reaches_the_script(config: RunConfig) -> None:
    profile = _profile(
        partition="gpu",
        account="me",
        memory="0",
        signal_seconds=321,
        network_interface="ib7",
        setup=["module load cuda"],
        environment={"NCCL_IB_HCA": "mlx5_0,mlx5_1", "NCCL_SOCKET_IFNAME": "ib9"},
        hf_home="$SCRATCH/hub",
    )
    lines = _script("train", config, profile).splitlines()
    for line in (
        "#SBATCH --partition=gpu",
        "#SBATCH --account=me",
        "#SBATCH --mem=0",
        "#SBATCH --exclusive",
        "#SBATCH --signal=B:USR1@321",
        "#SBATCH --requeue",
        "#SBATCH --job-name=a_run",
        "module load cuda",
        "export NCCL_IB_HCA=mlx5_0,mlx5_1",
        "export NCCL_SOCKET_IFNAME=ib9",
        "export GLOO_SOCKET_IFNAME=ib7",
        'export HF_HOME="$SCRATCH/hub"',
        "export HF_HUB_OFFLINE=1",
    ):
        assert line in lines
    assert all("HF_HUB_OFFLINE" not in line for line in _script("train", config, _profile(offline=False)).splitlines())


def test_a_job_that_may_not_be_requeued_is_not(config: RunConfig) -> None:
    script = _script("train", config, _profile(requeue=False))
    assert "#SBATCH --no-requeue" in script and "scontrol requeue" not in script


def test_conversions_ask_for_no_gpu(config: RunConfig) -> None:
    profile = _profile(partition="gpu", cpu_partition="cpu", cpu_memory="90G", constraint="h100")
    script = _script("convert", config, profile)
    assert "--partition=cpu\n" in script and "--mem=90G\n" in script and "gpus" not in script and "h100" not in script
    assert "convert hf-to-megatron" in script and "actor.data_parallel=8" in script


def test_values_are_words_of_the_shell_that_run_nothing(tmp_path: Path) -> None:
    for value in ("plain", "two words", "$(touch x)", "`touch x`", 'a"b', "back\\slash", "a;b", "it's", "*"):
        said = subprocess.run(
            ["bash", "-c", f"printf %s {expanded(value)}"], capture_output=True, text=True, cwd=tmp_path
        )
        assert said.stdout == value and said.returncode == 0
    said = subprocess.run(
        ["bash", "-c", f"A=1 B='x y'; printf %s {expanded('$A/${B}')}"], capture_output=True, text=True
    )
    assert said.stdout == "1/x y"
    assert list(tmp_path.iterdir()) == []


def test_a_template_with_an_unknown_variable_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job.j2").write_text("#SBATCH --nodes={{ noodles }}\n")
    with pytest.raises(UserError, match="noodles"):
        render("job.j2", {"nodes": 1}, tmp_path)


# Placement


@given(st.integers(1, 512), st.sampled_from([1, 4, 8]), st.none() | st.integers(1, 64))
def test_ranks_are_spread_evenly_or_refused_with_a_number_that_works(world: int, gpus: int, nodes: int | None) -> None:
    try:
        placement = place(world, gpus, nodes)
    except UserError as error:
        wanted = int(str(error).rpartition("--nodes ")[2].split()[0])
        assert nodes not in (None, wanted)
        placement = place(world, gpus, wanted)
    assert placement.nodes * placement.tasks_per_node == world and placement.tasks_per_node <= gpus
    if nodes is None and world % gpus == 0:
        assert placement == Placement(world // gpus, gpus)


def test_a_rank_learns_its_place_from_srun() -> None:
    told = {
        "SLURM_PROCID": "11",
        "SLURM_LOCALID": "3",
        "SLURM_STEP_NUM_TASKS": "16",
        "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
        "SLURM_NTASKS": "99",
    }
    assert rank_environment(told) == {"RANK": "11", "LOCAL_RANK": "3", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}


# Sweeps


def test_a_sweep_is_all_combinations_each_in_a_directory_of_its_own(tmp_path: Path, config: RunConfig) -> None:
    request = Request("sweep", config, _profile(), sweep=("seed=1,2", "loss.name=grpo,respo"), at_once=3)
    runs = sweep_runs(request)
    assert [(run.seed, run.loss.name) for run in runs] == [(1, "grpo"), (1, "respo"), (2, "grpo"), (2, "respo")]
    assert [run.run_dir for run in runs] == [
        tmp_path / "run" / f"seed-{seed}_name-{name}" for seed in (1, 2) for name in ("grpo", "respo")
    ]
    assert len({run.name for run in runs}) == 4
    assert "#SBATCH --array=0-3%3\n" in render(KINDS["sweep"][0], variables(request, runs))


# Secrets


@pytest.mark.parametrize(
    "tree",
    [
        {"environment": {"HF_TOKEN": "anything"}},
        {"environment": {"WANDB_API_KEY": "0123"}},
        {"a": {"password": "hunter2"}},
        {"a": [{"b": TOKEN}]},
        {"setup": [f"export WHATEVER={TOKEN}"]},
        {"setup": ["export AWS_SECRET_ACCESS_KEY=abc"]},
        {"a": "sk-" + "x" * 20},
        {"a": "0123456789abcdef0123456789abcdef01234567"},
        {"a": "https://me:pass@host/x"},
    ],
)
def test_what_looks_like_a_key_is_refused_without_being_shown(tree: dict) -> None:
    with pytest.raises(UserError, match="looks like a key; take it out and export it") as error:
        refuse_secrets(tree, "profile.yaml")
    assert TOKEN not in str(error.value) and "hunter2" not in str(error.value)
    with pytest.raises(UserError, match="looks like a key"):
        refuse_secrets_in_text(json.dumps(tree) if "a" in tree else yaml.safe_dump(tree), "job.j2")


def test_what_only_sounds_like_a_key_is_not_refused(config: RunConfig) -> None:
    refuse_secrets(config.model_dump(mode="json"), "run.yaml")
    refuse_secrets(
        {
            "environment": {"HF_TOKEN": "$HF_TOKEN", "TOKENIZERS_PARALLELISM": "false"},
            "data": {"prompt_key": "problem", "answer_key": "answer"},
            "path": "/hub/models--a--b/snapshots/0123456789abcdef0123456789abcdef01234567",
            "loss": {"aggregation": "token-mean"},
            "actor": {"micro_batch_tokens": 8192},
        },
        "run.yaml",
    )


def test_a_template_that_holds_a_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job.j2").write_text(f"#!/bin/bash\nexport HF_TOKEN={TOKEN}\n")
    with pytest.raises(UserError, match=r"job.j2 line 2 holds what looks like a key"):
        render("job.j2", {}, tmp_path)


def test_a_profile_or_override_that_holds_a_key_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    profile = tmp_path / "profile.yaml"
    profile.write_text(yaml.safe_dump({"name": "x", "runtime": {"path": "/e"}, "environment": {"HF_TOKEN": TOKEN}}))
    assert main([str(_run_yaml(tmp_path)), "--cluster", str(profile)]) == 2
    assert f"{profile}: environment.HF_TOKEN holds what looks like a key" in capsys.readouterr().err
    assert main([str(_run_yaml(tmp_path)), "--cluster", str(CLUSTERS[0]), f"name={TOKEN}"]) == 2
    said = capsys.readouterr().err
    assert "the command line: [0] holds what looks like a key" in said and TOKEN not in said
    assert not (tmp_path / "run").exists()


# The command line


def test_a_misspelt_key_of_a_profile_is_refused_with_the_nearest(tmp_path: Path) -> None:
    path = tmp_path / "profile.yaml"
    path.write_text(yaml.safe_dump({"name": "x", "runtime": {"path": "/e"}, "gpus_pernode": 4}))
    with pytest.raises(UserError, match="gpus_per_node"):
        load_profile(path)


def test_servers_on_other_nodes_are_not_submitted(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    words = [str(_run_yaml(tmp_path)), "--cluster", str(CLUSTERS[0]), "--job", "disaggregated", "--submit"]
    assert main(words) == 2
    assert "cannot be submitted yet" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["--nodes=0", "--walltime", "--chain=x"])
def test_an_unknown_option_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture, word: str) -> None:
    assert main([str(_run_yaml(tmp_path)), "--cluster", str(CLUSTERS[0]), word]) == 2
    assert capsys.readouterr().err.count("\n") == 1


# Following


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ([("COMPLETED", 0), ("COMPLETED", 0)], 0),
        ([("COMPLETED", 0), ("FAILED", 7), ("FAILED", 1)], 7),
        ([("CANCELLED", 0)], 1),
        ([("TIMEOUT", 0), ("COMPLETED", 0)], 1),
    ],
)
def test_a_job_ends_with_the_code_of_its_first_part_that_failed(parts: list[tuple[str, int]], code: int) -> None:
    assert ended_code([JobState("1", state, number, 0, "None") for state, number in parts]) == code


# Git


def test_the_state_of_the_code_is_its_commit_and_a_digest_of_what_differs(tmp_path: Path) -> None:
    assert git_state(tmp_path).commit is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@x"]
    (tmp_path / "a").write_text("1")
    for words in (["init", "-q", "-b", "main"], ["add", "a"], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *words], check=True)
    clean = git_state(tmp_path)
    assert clean.commit is not None and len(clean.commit) == 40
    assert (clean.branch, clean.dirty, clean.diff_sha256) == ("main", False, None)
    digests = set()
    for name, content in (("a", "2"), ("b", "new"), ("b", "newer")):
        (tmp_path / name).write_text(content)
        digests.add(git_state(tmp_path).diff_sha256)
    assert len(digests) == 3 and None not in digests and git_state(tmp_path).commit == clean.commit
