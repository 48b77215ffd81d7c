"""Makes what the CIFAR-10 programs train: network, data, optimizer."""

import functools
from collections.abc import Sequence

from cifar10 import config as config_lib
from tf_replicas.programs import compute_dtypes
from tf_replicas.programs import learning_rates
from tf_replicas.programs import run_config
from tf_replicas.programs import run_options
from tf_replicas.programs import update_options


def train(
  config: config_lib.Config, options: run_options.Options
) -> run_options.Outcome:
  """Trains the CIFAR-10 network in this process, as `options` say.

  Args:
    config: The settings of what to train.
    options: How to run the training.

  Returns:
    The global step reached, and the loss of the last update.
  """
  from tf_replicas.programs import task_runner

  return task_runner.train(options, make(config, options))


def make(
  config: config_lib.Config, options: run_options.Options | None = None
) -> run_options.Workload:
  """Makes the workload of a training: network, data and optimizer.

  Downloads the data set if it is missing, but not in a dry run.

  Args:
    config: The settings of what to train.
    options: How to run the training; None trains on one device.

  Returns:
    The workload, for `task_runner.train`.

  Raises:
    cluster.ClusterError: If the batch size or the length of the training does
      not fit the options.
    sources.DataError: If the data set cannot be read.
  """
  from cifar10 import sources

  spec = run_options.one_machine_spec(0)
  options = options or run_options.Options(spec, config.train_dir)
  run_options.check_length(options, config.batch_size, config.max_steps)
  try:
    sources.find(config.dataset, config.data_dir, download=not options.dry_run)
  except sources.NotPreparedError:
    place = config.data_dir or "the default directory of TensorFlow Datasets"
    print(f"{config.dataset} is not in {place} yet; training will download it")
  rate = config.learning_rate
  default = config_lib.default_rate(
    config.recipe,
    options,
    batch_size=config.batch_size,
    dataset=config.dataset,
    is_scaled_later=config.learning_rate_scale != 1.0,
  )
  rate_note = learning_rates.describe(default, rate)
  if config.learning_rate_scale != 1.0:
    rate_note += f", times {config.learning_rate_scale:g}"
  others = ["a longer --warmup_epochs"] * bool(config.warmup_epochs)
  return run_options.Workload(
    replica_fn=functools.partial(_replica, config, options),
    optimizer_fn=functools.partial(_optimizer, config, options),
    learning_rate_fn=functools.partial(config_lib.learning_rate, config),
    batch_size=config.batch_size,
    max_steps=config.max_steps,
    max_examples=config_lib.num_examples(config),
    on_start=functools.partial(run_config.record, config),
    rate_note=rate_note,
    divergence_advice=learning_rates.advice(
      default, rate, options.update, *others
    ),
    summary_fn=functools.partial(_summary_fn, config),
  )


def _summary_fn(config: config_lib.Config):
  from cifar10 import tutorial_summaries

  return tutorial_summaries.make(config)


def _replica(
  config: config_lib.Config,
  options: run_options.Options,
  devices: Sequence[str],
):
  # TensorFlow is imported only by the tasks that compute.
  import tensorflow as tf

  import tf_replicas
  from cifar10 import inputs
  from cifar10 import model as model_lib
  from cifar10 import sources

  model = model_lib.build(seed=config.seed, compute_dtype=config.compute_dtype)
  paths = [variable.path for variable in model.trainable_variables]
  placed = options.place_layers(model)
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

  batch_size = config.batch_size * num_towers
  make = functools.partial(
    inputs.train_dataset,
    batch_size=batch_size,
    seed=config.seed,
    used_share=options.used_share,
    distort_colors=config.distort_colors,
    centered_from=config_lib.centered_from(config),
    crop_sizes=config_lib.crop_sizes(config),
  )

  def source():
    return sources.find(config.dataset, config.data_dir)

  def dataset_fn(num_shards, shard_index, start_example):
    return make(
      source(),
      num_shards=num_shards,
      shard_index=shard_index,
      start_example=start_example,
    )

  return tf_replicas.Replica(
    model.trainable_variables,
    loss_fn,
    dataset_fn,
    devices,
    layers=placed,
    micro_batches=options.micro_batches,
    loss_scale=compute_dtypes.loss_scale(config.compute_dtype, options.update),
    leased=tf_replicas.LeasedData(
      lambda numbers: make(source(), numbers=numbers),
      lambda _, examples: examples // batch_size,
    ),
  )


def _optimizer(
  config: config_lib.Config,
  options: run_options.Options,
  new_rule: update_options.RuleFn,
):
  import keras

  import tf_replicas

  if config.optimizer == "muon":
    from cifar10 import muon

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
    loss_scale=compute_dtypes.fixed_loss_scale(
      config.compute_dtype, options.update
    ),
  )
