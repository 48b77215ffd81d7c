"""Replicated training with TensorFlow, synchronous to asynchronous.

The public names; each is imported when it is first used, so that what needs no
TensorFlow (`cluster`) does not load it.
"""

import importlib

__version__ = "0.1.0"

_MODULE_OF = {
  "AsyncReplicasOptimizer": "async_replicas",
  "BetweenGraph": "between_graph",
  "ClusterError": "cluster",
  "ClusterSpec": "cluster",
  "InGraph": "in_graph",
  "LocalCluster": "local_cluster",
  "Mirrored": "mirrored",
  "MovingAverages": "moving_averages",
  "NonFiniteGradientError": "updates",
  "OneMachine": "one_machine",
  "ParameterStore": "parameter_store",
  "Replica": "towers",
  "Session": "training",
  "StepResult": "training",
  "SwitchingOptimizer": "switching",
  "SyncReplicasOptimizer": "sync_replicas",
  "Task": "cluster",
  "accumulated_gradients": "periodic_averaging",
  "elastic_average": "periodic_averaging",
  "exit_now": "processes",
  "keras_replica": "keras_models",
  "load_into_keras": "evaluation",
  "model_average": "periodic_averaging",
  "place_layers": "model_parallel",
  "serve": "server",
}

__all__ = sorted(_MODULE_OF)  # noqa: PLE0605


def __getattr__(name: str):
  if name in _MODULE_OF:
    module = importlib.import_module(f"tf_replicas.{_MODULE_OF[name]}")
    return getattr(module, name)
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
  return [*__all__, "__version__"]
