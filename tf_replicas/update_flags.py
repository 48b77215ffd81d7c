"""The flags that choose the update rule."""

from absl import flags

from tf_replicas import update_settings


def define() -> None:
  """The flags of `update_settings.UpdateSettings`."""
  flags.DEFINE_list(
    "update",
    [update_settings.SYNC],
    f"The update rule, of {', '.join(update_settings.RULES)}; the last"
    f" {len(update_settings.POLICIES)} may be combined by commas",
  )
  flags.DEFINE_boolean(
    "use_locking",
    False,
    "Asynchronous updates of a variable exclude each other",
  )
  flags.DEFINE_boolean(
    "snapshot_reads",
    False,
    "Asynchronous replicas read all variables at one version",
  )
  flags.DEFINE_integer(
    "max_staleness",
    None,
    "Largest staleness, for bounded_staleness and drop_stale",
    lower_bound=0,
  )
  flags.DEFINE_integer(
    "softsync_n",
    None,
    "For softsync: an update per (replicas / N) gradients",
    lower_bound=1,
  )
  flags.DEFINE_float(
    "delay_compensation", None, "For delay_compensated: its lambda"
  )
  flags.DEFINE_integer(
    "period",
    None,
    "Local steps between meetings; default: the rule's",
    lower_bound=1,
  )
  flags.DEFINE_float(
    "moving_rate",
    None,
    "For elastic_average: share of the way to each other that a copy and the"
    " centre go when they meet; default: 0.9 / period / replicas",
    lower_bound=0,
  )
  flags.DEFINE_float(
    "rho",
    None,
    "For elastic_average: strength of the pull to the centre in local steps;"
    " default: moving_rate / learning rate",
    lower_bound=0,
  )
  flags.DEFINE_list(
    "then_update",
    [],
    "The rule that follows on --update in the same training, of"
    f" {', '.join(update_settings.SWITCHABLE)}",
  )
  flags.DEFINE_integer(
    "switch_at_step",
    None,
    "Change to --then_update at this global step",
    lower_bound=1,
  )
  flags.DEFINE_float(
    "switch_when_refused",
    None,
    "Or once more than this share of some replica's gradients is refused",
    lower_bound=0,
    upper_bound=1,
  )
  flags.DEFINE_float(
    "switch_when_slow",
    None,
    "Or once updates wait for one replica for more than this share of time",
    lower_bound=0,
    upper_bound=1,
  )
  flags.DEFINE_integer(
    "refresh_every",
    1,
    "Gradients computed from one read of the variables",
    lower_bound=1,
  )
  flags.DEFINE_enum(
    "wire_dtype",
    None,
    ["float16", "bfloat16"],
    "Send parameters and gradients as this; default: as they are",
  )
