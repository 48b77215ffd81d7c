"""Tests all update rules of the registry by the tests of `rule_suite`."""

import itertools

from absl.testing import absltest

from tests.conformance import registry
from tests.conformance import rule_suite
from tests.support import stores

for _name, _case in registry.RULES.items():
  _class = f"Test_{_name}"
  globals()[_class] = type(
    _class,
    (rule_suite.RuleSuite, stores.TestCase),
    {"case": _case, "__module__": __name__},
  )


class SignatureTest(absltest.TestCase):
  def test_settings_differ_in_it(self):
    signatures = {
      name: case.rule().signature() for name, case in registry.RULES.items()
    }
    for one, other in itertools.combinations(signatures, 2):
      self.assertNotEqual(signatures[one], signatures[other], (one, other))


if __name__ == "__main__":
  absltest.main()
