"""A real SLURM cluster of false eight-GPU nodes on this machine, for tests: up in a second or two, down by process.

Every node has a network namespace with an address and a host name of its own, so ranks meet as they do between
machines. Daemons are children of the process that starts them and die with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "munged", "ip", "unshare")
GPUS = 8


def missing() -> str | None:
    """Why there can be no cluster here, or None."""
    if os.geteuid() != 0:
        return "a SLURM cluster for tests needs root"
    absent = [name for name in PROGRAMS if shutil.which(name, path=_search_path()) is None]
    return f"{', '.join(absent)} is not installed: make slurm-env" if absent else None


def _search_path() -> str:
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class MiniSlurm:
    """`up()`, then `run(...)` commands against it, then `down()`. Jobs get the last two nodes first, where they may.

    root   a directory of its own with a short path
    """

    def __init__(self, root: Path, nodes: int) -> None:
        self.root, self.count = root, nodes
        tag = os.getpid() % 65536  # names and addresses that no cluster of another process has
        self._prefix = f"t{tag:x}"
        self._net = f"10.{128 + tag // 256 // 2}.{tag % 256}"
        self._host = socket.gethostname().partition(".")[0]
        self._controller_port, self._node_port = _free_port(), _free_port()
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {
            **os.environ,
            "PATH": _search_path(),
            "SLURM_CONF": str(root / "etc/slurm.conf"),
        }

    # Configuration

    def _slurm_conf(self) -> str:
        here, last = self.root, self.count
        return f"""
ClusterName=mini
SlurmctldHost={self._host}({self._net}.254)
SlurmctldPort={self._controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={here}/munge/socket,cred_expire=5
StateSaveLocation={here}/state
SlurmdSpoolDir={here}/spool/%n
SlurmctldPidFile={here}/slurmctld.pid
SlurmdPidFile={here}/slurmd-%n.pid
SlurmctldLogFile={here}/log/slurmctld.log
SlurmdLogFile={here}/log/%n.log
SlurmdParameters=config_overrides
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
EnforcePartLimits=ALL
ReturnToService=2
SlurmdTimeout=300
KillWait=3
MinJobAge=3600
GresTypes=gpu
NodeName=DEFAULT Port={self._node_port} CPUs=64 RealMemory=100000 Gres=gpu:{GPUS}
NodeName=node[1-{last - 2}] NodeAddr={self._net}.[1-{last - 2}] Weight=2
NodeName=node[{last - 1}-{last}] NodeAddr={self._net}.[{last - 1}-{last}] Weight=1
PartitionName=train Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=10
PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=100
"""

    def _configure(self) -> None:
        for name in ("etc", "state", "log", "spool", "dev", "munge"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        (self.root / "munge").chmod(0o755)
        for gpu in range(GPUS):  # SLURM wants device nodes; these are /dev/null by another name
            os.mknod(self.root / f"dev/gpu{gpu}", 0o666 | 0o020000, os.makedev(1, 3))
        (self.root / "etc/slurm.conf").write_text(self._slurm_conf())
        gres = f"NodeName=node[1-{self.count}] Name=gpu File={self.root}/dev/gpu[0-{GPUS - 1}]\n"
        (self.root / "etc/gres.conf").write_text(gres)
        (self.root / "etc/cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nConstrainCores=no\nConstrainRAMSpace=no\n")
        key = self.root / "munge/key"
        key.write_bytes(os.urandom(64))
        key.chmod(0o400)

    # Network

    def _space(self, node: int) -> str:
        return f"{self._prefix}n{node}"

    def _ip(self, *words: str, check: bool = True) -> str:
        done = subprocess.run(["ip", *words], capture_output=True, text=True, env=self.environment)
        assert not check or done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
        return done.stdout

    def _connect(self) -> None:
        bridge = f"{self._prefix}br"
        self._ip("link", "add", bridge, "type", "bridge")
        self._ip("addr", "add", f"{self._net}.254/24", "dev", bridge)
        self._ip("link", "set", bridge, "up")
        names = [("127.0.0.1", "localhost"), (f"{self._net}.254", self._host)]
        names += [(f"{self._net}.{node}", f"node{node}") for node in range(1, self.count + 1)]
        for node in range(1, self.count + 1):
            space, link = self._space(node), f"{self._prefix}v{node}"
            hosts = Path("/etc/netns") / space / "hosts"  # what `ip netns exec` shows as /etc/hosts
            hosts.parent.mkdir(parents=True, exist_ok=True)
            hosts.write_text("".join(f"{address} {name}\n" for address, name in names))
            self._ip("netns", "add", space)
            self._ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
            self._ip("link", "set", link, "master", bridge, "up")
            self._ip("-n", space, "addr", "add", f"{self._net}.{node}/24", "dev", "eth0")
            self._ip("-n", space, "link", "set", "eth0", "up")
            self._ip("-n", space, "link", "set", "lo", "up")

    def _disconnect(self) -> None:
        for node in range(1, self.count + 1):
            self._ip("netns", "del", self._space(node), check=False)
            self._ip("link", "del", f"{self._prefix}v{node}", check=False)
            shutil.rmtree(Path("/etc/netns") / self._space(node), ignore_errors=True)
        self._ip("link", "del", f"{self._prefix}br", check=False)

    # Daemons

    def _start(self, name: str, command: Sequence[str]) -> None:
        with open(self.root / f"log/{name}.out", "ab") as output:
            self._daemons[name] = subprocess.Popen(
                list(command),
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                preexec_fn=_die_with_parent,
            )

    def start_node(self, node: int) -> None:
        """Switch a node on."""
        host = f"hostname node{node}; exec slurmd -D -N node{node}"
        self._start(f"node{node}", ["ip", "netns", "exec", self._space(node), "unshare", "--uts", "sh", "-c", host])

    def kill_node(self, node: int) -> None:
        """Cut a node's power: everything on it dies at once, and SLURM learns that it is down."""
        self._ip("link", "set", f"{self._prefix}v{node}", "down")
        self._kill_space(node)
        self.run("scontrol", "update", f"nodename=node{node}", "state=down", "reason=power")

    def _kill_space(self, node: int) -> None:
        for pid in self._ip("netns", "pids", self._space(node), check=False).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def up(self) -> None:
        """Start everything; returns when all nodes are idle."""
        self._configure()
        self._connect()
        munge = self.root / "munge"
        files = [f"--{name}-file={munge}/{file}" for name, file in (("key", "key"), ("pid", "pid"), ("log", "log"))]
        files += [f"--seed-file={munge}/seed", f"--socket={munge}/socket"]
        self._start("munged", ["munged", "--foreground", "--force", *files])
        self._until(lambda: (munge / "socket").exists(), "munged has no socket")
        self._start("slurmctld", ["slurmctld", "-D", "-c"])
        for node in range(1, self.count + 1):
            self.start_node(node)
        idle = ("sinfo", "-h", "-p", "train", "-t", "idle", "-o", "%D")
        self._until(lambda: self.run(*idle, check=False).stdout.strip() == str(self.count), "nodes are not idle")

    def down(self) -> None:
        """Stop every daemon and everything on the nodes; takes the network away."""
        for node in range(1, self.count + 1):
            self._kill_space(node)
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait()
        self._disconnect()

    def _until(self, condition, failure: str, seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            logs = "".join(f"== {p}\n{p.read_text()[-1500:]}" for p in sorted((self.root / "log").glob("*")))
            assert time.monotonic() < deadline, f"{failure}\n{logs}"
            time.sleep(0.1)

    # Use

    def run(
        self, *command: str | Path, check: bool = True, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """A command as on the cluster's login node."""
        words = [str(word) for word in command]
        done = subprocess.run(words, capture_output=True, text=True, env=self.environment, timeout=600)
        assert not check or done.returncode == 0, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def show(self, job: str, name: str) -> str:
        """A field of `scontrol show job`."""
        words = self.run("scontrol", "show", "job", "-o", job).stdout.split()
        return next((word.partition("=")[2] for word in words if word.startswith(f"{name}=")), "")

    def wait_for(self, job: str, *states: str, seconds: float = 300) -> str:
        """Wait until a job is in one of `states`; the state."""
        self._until(lambda: self.show(job, "JobState") in states, f"job {job} is not {states}", seconds)
        return self.show(job, "JobState")
