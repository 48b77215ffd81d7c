"""Makes what the Inception programs train: network, data and optimizer."""

import dataclasses
import functools
from collections.abc import Sequence

from inception_mini import config as config_lib
from tf_replicas.programs import compute_dtypes
from tf_replicas.programs import learning_rates
from tf_replicas.programs import run_config
from tf_replicas.programs import run_options
from tf_replicas.programs import update_options
from tf_replicas.runtime import processes


def train(
  config: config_lib.Config, options: run_options.Options
) -> run_options.Outcome:
  """Trains an Inception network in this process.

  Args:
    config: The settings of what to train.
    options: How to run the training.

  Returns:
    The global step reached, and the loss of the last update.

  Raises:
    Exception: Any exception of `make` or `task_runner.train`.
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
    sources.DataError: If the data set cannot be read, has more classes than
      `config` or an unknown number of classes, or has fewer examples than there
      are replicas.
    checkpoints.CheckpointError: If the checkpoint to fine-tune does not exist.
  """
  with processes.importing_tensorflow():
    from inception_mini import model
    from inception_mini import sources

  spec = run_options.one_machine_spec(0)
  options = options or run_options.Options(spec, config.train_dir)
  run_options.check_length(options, config.batch_size, config.max_steps)
  source = sources.find(
    config.dataset,
    config.data_dir,
    subsets=("train",),
    download=not options.dry_run,
  )
  try:
    num_classes = model.num_classes(config, source.num_classes)
  except ValueError as error:  # The data set has more.
    raise sources.DataError(str(error)) from None
  if source.num_train < len(options.replicas):
    raise sources.DataError(
      f"{config.data_dir or config.dataset} must have a training example for"
      f" each of {len(options.replicas)} replicas. Received:"
      f" {source.num_train}."
    )
  pretrained = config.pretrained_model_checkpoint_path
  if pretrained is not None:
    _check_pretrained(pretrained, options)
  config = dataclasses.replace(config, num_classes=num_classes)
  rate = config.learning_rate
  default = config_lib.default_rate(
    config.recipe, options, batch_size=config.batch_size
  )
  return run_options.Workload(
    replica_fn=functools.partial(_replica, config, source, options),
    optimizer_fn=functools.partial(_optimizer, config, options),
    learning_rate_fn=functools.partial(
      config_lib.learning_rate,
      config,
      num_examples_per_epoch=source.num_train,
    ),
    batch_size=config.batch_size,
    max_steps=config.max_steps,
    on_start=functools.partial(run_config.record, config),
    rate_note=learning_rates.describe(default, rate),
    divergence_advice=learning_rates.advice(
      default, rate, options.update, "a longer --warmup_epochs"
    ),
    initialize=pretrained and functools.partial(_start_from, pretrained),
  )


def _check_pretrained(pretrained: str, options: run_options.Options) -> None:
  """Checks that the checkpoint to fine-tune exists.

  Only the chief, which reads the checkpoint, checks it: other tasks may be on
  machines that do not have the file. Nothing is checked if the training resumes
  from a checkpoint of its own.

  Args:
    pretrained: Path of the checkpoint, or of a directory of checkpoints.
    options: How the training is run.

  Raises:
    checkpoints.CheckpointError: If there is no such checkpoint.
  """
  from tf_replicas.session import checkpoints
  from tf_replicas.session import warm_start

  # The other tasks may be on machines that do not see it.
  if options.task in (None, options.spec.chief):
    if checkpoints.latest(options.train_dir) is None:  # Otherwise not read.
      warm_start.find(pretrained)


def _replica(
  config: config_lib.Config,
  source,
  options: run_options.Options,
  devices: Sequence[str],
):
  # TensorFlow is imported only by the tasks that compute.
  import tf_replicas
  from inception_mini import inputs
  from inception_mini import model as model_lib

  model = model_lib.of_config(config)
  statistics = [
    variable
    for variable in model.non_trainable_variables
    if model_lib.is_statistic(variable.path)
  ]
  placed = options.place_layers(model)
  num_towers = max(1, len(placed.towers(devices)))

  make = functools.partial(
    inputs.train_dataset,
    source,
    config,
    batch_size=config.batch_size * num_towers,
    with_seeds=True,
    # Towers on GPUs take more images.
    parallel_images=inputs.PARALLEL_IMAGES * num_towers,
  )

  def dataset_fn(num_shards, shard_index, start_example):
    return make(
      num_shards=num_shards,
      shard_index=shard_index,
      start_example=start_example,
    )

  def units_before(_, examples):
    return examples * inputs.leased_units(source) // source.num_train

  return tf_replicas.Replica(
    model.trainable_variables,
    _loss_fn(config, model, statistics),
    dataset_fn,
    devices,
    layers=placed,
    micro_batches=options.micro_batches,
    loss_scale=compute_dtypes.loss_scale(config.compute_dtype, options.update),
    statistics=statistics,
    is_synchronized=config.batch_norm_statistics == config_lib.SYNCHRONIZED,
    leased=tf_replicas.LeasedData(
      lambda leases: make(leases=leases), units_before
    ),
  )


def _loss_fn(config: config_lib.Config, model, statistics):
  """Makes the loss function of a replica.

  Args:
    config: The settings of the training.
    model: The network.
    statistics: The variables with the moving means and variances.

  Returns:
    A function of (parameters, images, labels, seeds). `parameters` is a list of
    the values of the model's trainable variables and then of `statistics`. The
    function returns the loss and a list of new values of `statistics`.
  """
  import tensorflow as tf

  from inception_mini import model as model_lib

  paths = [v.path for v in [*model.trainable_variables, *statistics]]

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

  return loss_fn


def _optimizer(
  config: config_lib.Config,
  options: run_options.Options,
  new_rule: update_options.RuleFn,
):
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
    loss_scale=compute_dtypes.fixed_loss_scale(
      config.compute_dtype, options.update
    ),
  )


def _start_from(pretrained: str, store) -> None:
  """Starts a fine-tuning: restores variables from a checkpoint.

  The variables of the heads (classifiers) keep their initial values. Prints the
  names of all variables.

  Args:
    pretrained: Path of the checkpoint, or of a directory of checkpoints.
    store: Holds the variables of the training.
  """
  from inception_mini import model as model_lib
  from tf_replicas.session import warm_start

  done = warm_start.transfer(pretrained, store, model_lib.is_head)
  print(f"fine-tuning starts from {done.path}; restored:", flush=True)
  for path in done.restored:
    print(f"  {path}", flush=True)
  print(f"initialized anew, not restored: {', '.join(done.fresh)}", flush=True)
