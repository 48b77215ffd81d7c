"""What the training binaries train, as the library takes it."""

import functools
from collections.abc import Mapping

from inception_mini import config as config_lib
from tf_replicas import cluster
from tf_replicas import compute_dtypes
from tf_replicas import program
from tf_replicas import run_settings


def make(
  config: config_lib.Config,
  source,
  *,
  layers: Mapping[str, int] | None = None,
  micro_batches: int = 1,
  pretrained: str | None = None,
) -> program.Workload:
  """The network, its data and its update rule.

  Args:
    config: What to train; with `num_classes`.
    source: The data, a `sources.Source`.
    layers: A cluster spec's `layers`: which layer is on which device of a
      tower.
    micro_batches: In how many parts a tower takes its batch.
    pretrained: A checkpoint or train directory, to start from its trunk.
  """
  initialize = None
  if pretrained is not None:
    initialize = functools.partial(_start_from, pretrained)
  return program.Workload(
    replica_fn=functools.partial(
      _replica, config, source, layers or {}, micro_batches
    ),
    optimizer_fn=functools.partial(_optimizer, config),
    learning_rate_fn=functools.partial(
      config_lib.learning_rate,
      config,
      num_examples_per_epoch=source.num_train,
    ),
    batch_size=config.batch_size,
    on_start=functools.partial(run_settings.record, config),
    initialize=initialize,
  )


def _replica(config, source, layers, micro_batches, devices):
  # TensorFlow is imported only by the tasks that compute.
  import tensorflow as tf

  import tf_replicas
  from inception_mini import inputs
  from inception_mini import model as model_lib

  model = model_lib.of_config(config)
  statistics = [
    variable
    for variable in model.non_trainable_variables
    if model_lib.is_statistic(variable.path)
  ]
  paths = [v.path for v in [*model.trainable_variables, *statistics]]
  try:
    placed = tf_replicas.place_layers(model, layers)
  except ValueError as error:  # It is the spec's.
    raise cluster.ClusterError(str(error)) from None
  num_towers = max(1, len(placed.towers(devices)))

  @tf.autograph.experimental.do_not_convert
  def loss_fn(parameters, images, labels, seeds):
    loss, states = model_lib.total_loss(
      model,
      dict(zip(paths, parameters, strict=True)),
      images,
      labels,
      dropout_seed=seeds[0],
      label_smoothing=config.label_smoothing,
      auxiliary_weight=config.auxiliary_weight,
      decay_factor=config.weight_decay,
    )
    return loss, [states[variable.path] for variable in statistics]

  def dataset_fn(num_shards, shard_index, start_example):
    return inputs.train_dataset(
      source,
      config,
      batch_size=config.batch_size * num_towers,
      num_shards=num_shards,
      shard_index=shard_index,
      start_example=start_example,
      with_seeds=True,
      # Towers on GPUs take more images.
      parallel_images=inputs.PARALLEL_IMAGES * num_towers,
    )

  return tf_replicas.Replica(
    model.trainable_variables,
    loss_fn,
    dataset_fn,
    devices,
    layers=placed,
    micro_batches=micro_batches,
    statistics=statistics,
    is_synchronized=config.batch_norm_statistics == config_lib.SYNCHRONIZED,
  )


def _optimizer(config, new_rule):
  import keras

  import tf_replicas

  return new_rule(
    keras.optimizers.RMSprop(
      config.learning_rate,
      rho=config.rmsprop_decay,
      momentum=config.rmsprop_momentum,
      epsilon=config.rmsprop_epsilon,
    ),
    variable_averages=tf_replicas.MovingAverages(config.moving_average_decay),
    has_chief_statistics=config.batch_norm_statistics == config_lib.CHIEF,
    loss_scale=compute_dtypes.loss_scale(config.compute_dtype),
  )


def _start_from(pretrained, store) -> None:
  """Restores all but the heads, and says what."""
  from inception_mini import model as model_lib
  from tf_replicas import fine_tuning

  done = fine_tuning.transfer(pretrained, store, model_lib.is_head)
  print(f"fine-tuning {done.path}: restored", flush=True)
  for path in done.restored:
    print(f"  {path}", flush=True)
  print(f"initialised afresh: {', '.join(done.fresh)}", flush=True)
