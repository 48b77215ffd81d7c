"""Describes, checks and starts the tasks (processes) of a cluster.

The package reads cluster specs and `TF_CONFIG`, checks them, finds free ports,
and runs the tasks of a cluster on this machine. Nothing in it imports
TensorFlow.
"""

from tf_replicas.cluster.exposure import check_private
from tf_replicas.cluster.spec import check_port_free
from tf_replicas.cluster.spec import ClusterError
from tf_replicas.cluster.spec import ClusterSpec
from tf_replicas.cluster.spec import from_tf_config
from tf_replicas.cluster.spec import load
from tf_replicas.cluster.spec import parse
from tf_replicas.cluster.spec import resolve_ports
from tf_replicas.cluster.spec import Task
from tf_replicas.cluster.spec import task_from_flags
from tf_replicas.cluster.spec import VariablesSpec

__all__ = [
  "ClusterError",
  "ClusterSpec",
  "Task",
  "VariablesSpec",
  "check_port_free",
  "check_private",
  "from_tf_config",
  "load",
  "parse",
  "resolve_ports",
  "task_from_flags",
]
