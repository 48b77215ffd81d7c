"""What the training binaries train, as the library takes it."""

import functools
from collections.abc import Mapping

from cifar10 import config as config_lib
from tf_replicas import cluster
from tf_replicas import compute_dtypes
from tf_replicas import program
from tf_replicas import run_settings


def make(
  config: config_lib.Config,
  *,
  layers: Mapping[str, int] | None = None,
  micro_batches: int = 1,
  used_share: float = 1.0,
) -> program.Workload:
  """The network, its data and its update rule.

  Args:
    config: What to train.
    layers: A cluster spec's `layers`: which layer is on which device of a
      tower.
    micro_batches: In how many parts a tower takes its batch.
    used_share: How many of all workers' batches are used by updates.
  """
  return program.Workload(
    replica_fn=functools.partial(
      _replica, config, layers or {}, micro_batches, used_share
    ),
    optimizer_fn=functools.partial(_optimizer, config),
    learning_rate_fn=functools.partial(config_lib.learning_rate, config),
    batch_size=config.batch_size,
    on_start=functools.partial(run_settings.record, config),
  )


def _replica(config, layers, micro_batches, used_share, devices):
  # TensorFlow is imported only by the tasks that compute.
  import tensorflow as tf

  import tf_replicas
  from cifar10 import inputs
  from cifar10 import model as model_lib
  from cifar10 import sources

  model = model_lib.build(seed=config.seed, compute_dtype=config.compute_dtype)
  paths = [variable.path for variable in model.trainable_variables]
  try:
    placed = tf_replicas.place_layers(model, layers)
  except ValueError as error:  # It is the spec's.
    raise cluster.ClusterError(str(error)) from None
  num_towers = max(1, len(placed.towers(devices)))

  @tf.autograph.experimental.do_not_convert
  def loss_fn(parameters, images, labels):
    loss, _ = model_lib.total_loss(
      model,
      dict(zip(paths, parameters, strict=True)),
      images,
      labels,
      decay_factor=config.weight_decay,
      label_smoothing=config.label_smoothing,
    )
    return loss

  def dataset_fn(num_shards, shard_index, start_example):
    return inputs.train_dataset(
      sources.find(config.dataset, config.data_dir),
      batch_size=config.batch_size * num_towers,
      seed=config.seed,
      num_shards=num_shards,
      shard_index=shard_index,
      start_example=start_example,
      used_share=used_share,
      distort_colors=config.distort_colors,
      centered_from=config_lib.centered_from(config),
      crop_sizes=config_lib.crop_sizes(config),
    )

  return tf_replicas.Replica(
    model.trainable_variables,
    loss_fn,
    dataset_fn,
    devices,
    layers=placed,
    micro_batches=micro_batches,
  )


def _optimizer(config, new_rule):
  import keras

  import tf_replicas
  from cifar10 import muon

  if config.optimizer == "muon":
    optimizer = muon.Muon(
      config.learning_rate,
      momentum=config.momentum,
      weight_decay=config.decoupled_weight_decay,
      adam_weight_decay=None,
      adam_lr_ratio=0.1,
      exclude_layers=["softmax_linear"],
    )
  else:
    optimizer = keras.optimizers.SGD(
      config.learning_rate, momentum=config.momentum
    )
  return new_rule(
    optimizer,
    variable_averages=tf_replicas.MovingAverages(config.moving_average_decay),
    loss_scale=compute_dtypes.loss_scale(config.compute_dtype),
  )
