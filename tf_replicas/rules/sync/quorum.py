"""Says how many contributions a synchronous update needs.

A contribution is one replica's gradients for one update. The user gives a
number, or a share of the replicas: "all", "all-1" or "90%". This module does
not import TensorFlow.
"""

import re
from typing import Any
from typing import NamedTuple

RULE = "a number of at least 1, `all`, `all-K` or `P%`"
_SHARE = re.compile(r"all(?:-(?P<less>[0-9]+))?|(?P<percent>[0-9]+)%")


class Quorum(NamedTuple):
  """The number of contributions (sets of gradients) that an update needs.

  If only A replicas take part, since others were lost or have not come yet, the
  number is `percent` % of A, rounded up, minus `less`, but at least `least` and
  at most `most`.

  Attributes:
    most: N, the number that an update needs if all replicas take part.
    least: The smallest number that an update may have.
    percent: The percentage of the replicas; 100 for "all" and for a number.
    less: The K of "all-K"; otherwise 0.
  """

  most: int
  least: int
  percent: int = 100
  less: int = 0

  @property
  def can_shrink(self) -> bool:
    """Whether an update may have fewer than N contributions."""
    return self.least < self.most

  def of(self, num_replicas: Any) -> Any:
    """Computes `percent` % of `num_replicas`, rounded up, minus `less`.

    Args:
      num_replicas: The number of replicas that take part: an int, or an int64
        scalar tensor.

    Returns:
      The number of contributions, of the same type. The limits `least` and
      `most` are not applied.
    """
    return (num_replicas * self.percent + 99) // 100 - self.less


def parse(
  value: int | str, num_replicas: int, min_contributions: int | None = None
) -> Quorum:
  """Makes a `Quorum` from what the user gives for `replicas_to_aggregate`.

  Args:
    value: N, the number of contributions in an update, which may exceed the
      number of replicas; or "all", "all-K" (all replicas but K) or "P%" (P
      percent of the replicas, rounded up).
    num_replicas: The number of replicas.
    min_contributions: The smallest number of contributions in an update if some
      replicas do not take part. None: no update has fewer than N.

  Returns:
    The quorum.

  Raises:
    ValueError: If `value` has another form, or means fewer than 1 or more than
      all replicas. The message begins with "must", so that the caller can put
      the name of the setting in front.
  """
  share = {}
  if isinstance(value, str):
    match = _SHARE.fullmatch(value)
    if match:
      share = {k: int(v) for k, v in match.groupdict().items() if v}
      most = Quorum(0, 0, **share).of(num_replicas)
      if 1 <= most <= num_replicas:
        return Quorum(most, min_contributions or most, **share)
      raise ValueError(
        f"must leave 1 to {num_replicas} of {num_replicas} replicas. Received:"
        f" {value!r}."
      )
  elif isinstance(value, int) and not isinstance(value, bool) and value >= 1:
    return Quorum(value, min_contributions or value)
  raise ValueError(f"must be {RULE}. Received: {value!r}.")
