"""What a cluster is like: one YAML file per cluster, from which the job scripts are rendered."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PositiveInt

from launch.secrets import refuse_secrets
from megatron_rlvr.config.load import build_tree, read_tree
from megatron_rlvr.config.tree import Section


def _time_limit(text: str) -> str:
    parts = text.partition("-")[2] or text
    if not all(piece.isdigit() for piece in (*parts.split(":"), text.partition("-")[0].replace(":", ""))):
        raise ValueError("give SLURM's D-HH:MM:SS or HH:MM:SS")
    return text


TimeLimit = Annotated[str, AfterValidator(_time_limit)]


def expanded(value: object) -> str:
    """A value as a shell reads it: $NAME stands for what the variable holds, nothing is run, nothing is split."""
    text = str(value)
    if re.fullmatch(r"[A-Za-z0-9_./:=@%+,-]+", text):
        return text
    return '"' + re.sub(r'[\\"`]', lambda match: "\\" + match.group(), text).replace("$(", "\\$(") + '"'


def _words(*words: str) -> str:
    return " ".join(expanded(word) for word in words)


class Runtime(Section):
    """Where Python with all packages comes from on the nodes."""

    kind: Literal["venv", "pyxis", "apptainer"] = "venv"
    path: str = Field(description="venv: its directory, the same on all nodes; pyxis, apptainer: the image")
    mounts: list[str] = Field(default_factory=list, description="HOST:CONTAINER pairs; a container sees nothing else")
    python: str = Field("python3", description="the interpreter inside a container")

    def python_words(self) -> str:
        """The words that run Python inside a step."""
        if self.kind == "venv":
            return _words(f"{self.path.rstrip('/')}/bin/python")
        if self.kind == "pyxis":
            return _words(self.python)
        binds = [word for mount in self.mounts for word in ("--bind", mount)]
        return _words("apptainer", "exec", "--nv", *binds, self.path, self.python)

    def container_words(self) -> str:
        """What srun needs to start a step in the container; empty where a step needs nothing."""
        if self.kind != "pyxis":
            return ""
        mounts = [f"--container-mounts={','.join(self.mounts)}"] if self.mounts else []
        return _words(f"--container-image={self.path}", *mounts, "--no-container-mount-home")

    def once_words(self) -> str:
        """What stands before `python` to run it one time on the first node."""
        if self.kind != "pyxis":
            return ""
        return 'srun --overlap --nodes=1 --ntasks=1 --ntasks-per-node=1 "${container[@]}"'


class ClusterProfile(Section):
    """A cluster: its queue, its nodes, its network and its software. No keys or tokens: they stay in the shell."""

    name: str
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    gpus_per_node: PositiveInt = 8
    gpu: str | None = Field(None, description="kind of GPU as the planner knows it, such as h100-80g or h200")
    cpus_per_task: PositiveInt | None = Field(None, description="CPU cores of each rank; default: the cluster's")
    memory: str | None = Field(None, description="--mem of a node; 0: all of it")
    exclusive: bool = Field(True, description="no other job on the nodes")
    time: TimeLimit = "24:00:00"
    signal_seconds: int = Field(
        600,
        ge=0,
        description="SIGUSR1 comes so long before the limit: longer than a rollout batch and a checkpoint take",
    )
    requeue: bool = Field(True, description="false where the site forbids it: then use --chain")
    max_crashes: PositiveInt = Field(3, description="a run that crashes so often without getting further is given up")
    cpu_partition: str | None = Field(None, description="where conversions run; default: partition")
    cpu_cores: PositiveInt = Field(8, description="cores of a conversion")
    cpu_memory: str | None = Field(None, description="--mem of a conversion")
    sbatch: list[str] = Field(default_factory=list, description="more options of sbatch, such as --comment=x")
    runtime: Runtime
    setup: list[str] = Field(default_factory=list, description="shell lines at the start, such as module load cuda")
    network_interface: str | None = Field(None, description="of the addresses that ranks meet at, such as ib0 or eth0")
    environment: dict[str, str] = Field(default_factory=dict, description="NCCL, UCX and other variables of the site")
    hf_home: str | None = Field(None, description="HF_HOME: the cache of the Hugging Face hub")
    offline: bool = Field(True, description="nodes without the internet: nothing asks the hub")

    def queue_options(self, *, cpu: bool = False) -> list[str]:
        """sbatch options that say where a job waits and what of a node it gets."""
        partition = self.cpu_partition or self.partition if cpu else self.partition
        named: dict[str, object] = {
            "partition": partition,
            "account": self.account,
            "qos": self.qos,
            "reservation": self.reservation,
        }
        if cpu:
            named |= {"cpus-per-task": self.cpu_cores, "mem": self.cpu_memory}
        else:
            named |= {"constraint": self.constraint, "cpus-per-task": self.cpus_per_task, "mem": self.memory}
        options = [f"--{name}={value}" for name, value in named.items() if value is not None]
        if self.exclusive and not cpu:
            options.append("--exclusive")
        return [*options, f"--time={self.time}", *self.sbatch]

    def exports(self) -> dict[str, str]:
        """Environment variables of a job; the profile's own come last and win."""
        found: dict[str, str] = {}
        if self.network_interface is not None:
            found |= dict.fromkeys(("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"), self.network_interface)
        if self.hf_home is not None:
            found["HF_HOME"] = self.hf_home
        if self.offline:
            found |= dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"), "1")
        return found | self.environment


def load_profile(path: Path) -> ClusterProfile:
    """Read a cluster profile.

    Raises UserError where it is missing, holds an unknown key or a wrong value, or anything that looks like a secret.
    """
    tree = read_tree(path)
    refuse_secrets(tree, str(path))
    return build_tree(tree, ClusterProfile)
