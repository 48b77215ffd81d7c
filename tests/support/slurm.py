"""Runs Slurm with one node on this machine, for tests."""

import contextlib
import os
import pathlib
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator

from tf_replicas.cluster import addresses

_COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
_START_SECS = 120.0


def missing() -> str:
  """Returns the reason why Slurm cannot run on this machine; "" if it can."""
  if os.geteuid():
    return "slurmd starts jobs as root only"
  absent = [name for name in _COMMANDS if not shutil.which(name, path=_path())]
  if absent:
    return (
      f"{', '.join(absent)} not installed: apt-get install slurmctld slurmd"
      " munge slurm-client"
    )
  return ""


def _path() -> str:
  return f"{os.environ['PATH']}:/usr/sbin"


@contextlib.contextmanager
def running(directory: pathlib.Path) -> Iterator[pathlib.Path]:
  """Runs Slurm, with this machine as its node, inside this context.

  The context yields the path of Slurm's configuration file. At its end, all
  jobs are canceled and the daemons are stopped.

  Args:
    directory: Directory of all files that Slurm writes.
  """
  key, munge = directory / "key", directory / "munge.socket"
  key.write_bytes(secrets.token_bytes(128))
  key.chmod(0o600)
  directory.chmod(0o755)  # What munged wants of the directory of its socket.
  conf = directory / "slurm.conf"
  conf.write_text(_configuration(directory, munge))
  environ = {**os.environ, "PATH": _path(), "SLURM_CONF": str(conf)}
  with contextlib.ExitStack() as daemons:

    def start(*command: str) -> subprocess.Popen:
      log = daemons.enter_context(open(directory / f"{command[0]}.out", "w"))
      process = subprocess.Popen(
        command, env=environ, stdout=log, stderr=subprocess.STDOUT
      )
      daemons.callback(_stop, process)
      return process

    def run(*command: str) -> str:
      return subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=60
      ).stdout

    files = {"key-file": "key", "pid-file": "munged.pid", "seed-file": "seed"}
    munged = start(
      *("munged", "--foreground", "--force", f"--socket={munge}"),
      f"--log-file={directory / 'munged.log'}",
      *[f"--{name}={directory / file}" for name, file in files.items()],
    )
    _await(munge.exists, munged, directory)
    slurmctld = start("slurmctld", "-D", "-c")
    slurmd = start("slurmd", "-D", "-c")
    for process in (slurmctld, slurmd):
      _await(
        lambda: "idle" in run("sinfo", "--noheader", "--format=%T"),
        process,
        directory,
      )
    try:
      yield conf
    finally:
      run("scancel", "--full", "--signal=KILL", "--user=root")
      _await(lambda: not run("squeue", "--noheader"), slurmctld, directory)


def _configuration(directory: pathlib.Path, munge: pathlib.Path) -> str:
  host = socket.gethostname().partition(".")[0]
  control_port, node_port = addresses.free_ports(2, taken=set())
  settings = {
    "ClusterName": "test",
    "SlurmctldHost": host,
    "SlurmctldPort": control_port,
    "SlurmdPort": node_port,
    "AuthInfo": f"socket={munge}",
    "FirstJobId": control_port,  # The ports of a job follow from it.
    "SlurmUser": "root",
    "SlurmdUser": "root",
    "StateSaveLocation": directory / "state",
    "SlurmdSpoolDir": directory / "spool",
    "SlurmctldPidFile": directory / "slurmctld.pid",
    "SlurmdPidFile": directory / "slurmd.pid",
    # Without cgroups and without a database of jobs.
    "ProctrackType": "proctrack/linuxproc",
    "TaskPlugin": "task/none",
    "JobAcctGatherType": "jobacct_gather/none",
    "SchedulerType": "sched/builtin",
    "ReturnToService": 2,
  }
  return "\n".join(
    [
      *[f"{name}={value}" for name, value in settings.items()],
      f"NodeName={host} CPUs=1",
      "PartitionName=all Nodes=ALL Default=YES",
      "",
    ]
  )


def _await(condition, process: subprocess.Popen, directory: pathlib.Path):
  """Waits until a condition holds that a daemon of Slurm brings about.

  Args:
    condition: Returns whether the condition holds.
    process: The daemon.
    directory: Directory of the daemons' output.

  Raises:
    AssertionError: If the daemon ends, or the condition does not hold after 120
      seconds. The message has the output of all daemons.
  """
  deadline = time.monotonic() + _START_SECS
  while not condition():
    if process.poll() is not None or time.monotonic() > deadline:
      logs = [p.read_text() for p in sorted(directory.glob("*.out"))]
      raise AssertionError("\n".join(["Slurm does not answer", *logs]))
    time.sleep(0.1)


def _stop(process: subprocess.Popen) -> None:
  process.terminate()
  try:
    process.wait(timeout=20)
  except subprocess.TimeoutExpired:
    process.kill()
    process.wait()
