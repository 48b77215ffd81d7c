"""Trains TensorFlow models by replicas, synchronously or asynchronously.

A *replica* computes gradients, with a copy of the model and a share of the
data. This module has the public names of the library. Each is imported on first
use: so importing this package does not import TensorFlow. (The subpackage
`cluster` needs no TensorFlow.)
"""

import importlib

__version__ = "0.2.0"

_MODULE_OF = {
  "Async": "fitting.roles",
  "AsyncReplicasOptimizer": "rules.asynchronous.async_replicas",
  "BetweenGraph": "drivers.between_graph",
  "ClusterError": "cluster",
  "ClusterSpec": "cluster",
  "Embedding": "replica.embeddings",
  "InGraph": "drivers.in_graph",
  "LeasedData": "replica.model_replica",
  "LocalCluster": "cluster.local_cluster",
  "LocalTraining": "programs.function_launcher",
  "LocalTrainingError": "programs.function_launcher",
  "LossScale": "store.loss_scaling",
  "Mirrored": "drivers.mirrored",
  "MovingAverages": "store.moving_averages",
  "NonFiniteGradientError": "rules.results",
  "OneMachine": "drivers.one_machine",
  "ParameterStore": "store.parameter_store",
  "Periodic": "fitting.roles",
  "Replica": "replica.model_replica",
  "Session": "session.training",
  "StepResult": "session.training",
  "Sync": "fitting.roles",
  "SwitchingOptimizer": "rules.switching",
  "SyncReplicasOptimizer": "rules.sync.sync_replicas",
  "Table": "replica.embeddings",
  "Task": "cluster",
  "accumulated_gradients": "rules.periodic.periodic_averaging",
  "elastic_average": "rules.periodic.periodic_averaging",
  "exit_now": "runtime.processes",
  "export": "replica.exporting",
  "fit": "fitting.keras_fit",
  "join": "fitting.custom_loop",
  "keras_replica": "replica.keras_models",
  "load_into_keras": "session.evaluation",
  "load_into_module": "replica.module_models",
  "load_tables": "replica.embeddings",
  "lookup": "replica.embeddings",
  "model_average": "rules.periodic.periodic_averaging",
  "model_fn_replica": "replica.module_models",
  "module_replica": "replica.module_models",
  "place_layers": "replica.model_parallel",
  "report": "programs.function_task",
  "run": "fitting.custom_loop",
  "serve": "drivers.server",
}

# Public modules, under shorter names than their own.
_MODULES = {
  "cluster": "cluster",
  "devices": "runtime.devices",
  "staleness": "rules.asynchronous.staleness",
  "switch_conditions": "rules.switch_conditions",
}

__all__ = sorted([*_MODULE_OF, *_MODULES])  # noqa: PLE0605


def __getattr__(name: str):
  if name in _MODULES:
    return importlib.import_module(f"tf_replicas.{_MODULES[name]}")
  if name in _MODULE_OF:
    module = importlib.import_module(f"tf_replicas.{_MODULE_OF[name]}")
    return getattr(module, name)
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
  return [*__all__, "__version__"]
