"""Says how many contributions a synchronous update needs.

A contribution is one replica's gradients for one update. The number is given as
a number, or as a share of the replicas: "all", "all-1" or "90%". This module
does not import TensorFlow.
"""

import re
from typing import Any
from typing import NamedTuple

RULE = "a number of at least 1, `all`, `all-K` or `P%`"
_SHARE = re.compile(r"all(?:-(?P<less>[0-9]+))?|(?P<percent>[0-9]+)%")


class Quorum(NamedTuple):
  """The number of contributions that an update needs.

  Attributes:
    most: N, the number that an update needs if all replicas take part.
    least: The number that it needs at least, however few replicas take part.
    percent: The share of the replicas that must contribute, in percent.
    less: How many contributions fewer than this share an update needs.
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
    """Computes the share of `num_replicas`, before the limits are applied.

    Args:
      num_replicas: The number of replicas that take part: an int, or an int64
        scalar tensor.

    Returns:
      The number of contributions, of the same type. It may be below `least` or
      above `most`.
    """
    return (num_replicas * self.percent + 99) // 100 - self.less


def parse(
  value: int | str, num_replicas: int, min_contributions: int | None = None
) -> Quorum:
  """Reads how many contributions an update needs.

  Args:
    value: A number, which may exceed the number of replicas; or "all", "all-K"
      (all replicas but K) or "P%" (P percent of the replicas, rounded up).
    num_replicas: The number of replicas.
    min_contributions: The smallest number of contributions in an update if some
      replicas do not take part. None: no update has fewer than N.

  Raises:
    ValueError: If `value` has another form, or leaves no contribution. The
      message starts with the rule, without a name.
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
