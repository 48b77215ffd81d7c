"""Tests for drivers.leases."""

import threading

import tensorflow as tf

from tests.support import stores
from tf_replicas.drivers import leases
from tf_replicas.runtime import resources


class LeasesTest(stores.TestCase):
  def _leases(self, namespace):
    return leases.Leases(namespace, "/device:CPU:0")

  def test_no_number_is_handed_out_twice(self):
    namespace = resources.new_namespace("leases")
    self._leases(namespace).begin(7)
    taken = [[], [], []]

    def take(numbers):
      data = self._leases(namespace).numbers()
      numbers += [int(number) for number in data.take(30)]

    threads = [threading.Thread(target=take, args=[t]) for t in taken]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    numbers = sorted(sum(taken, []))
    self.assertEqual(sorted(set(numbers)), numbers)
    self.assertEqual(numbers[0], 7)
    # Each data set may have leased some more that nobody has read.
    self.assertLess(numbers[-1], 7 + 3 * 40)
    for each in taken:
      self.assertEqual(sorted(each), each)

  def test_a_chief_that_comes_back_does_not_begin_again(self):
    namespace = resources.new_namespace("leases")
    first = self._leases(namespace)
    first.begin(3)
    self.assertEqual(int(first.take()), 3)
    second = self._leases(namespace)
    second.begin(0)
    self.assertEqual(int(second.take()), 4)

  def test_begins_again_after_an_older_checkpoint(self):
    found = self._leases(resources.new_namespace("leases"))
    found.begin(3)
    found.take()
    found.begin(2, is_back=True)
    self.assertEqual(int(found.take()), 2)


if __name__ == "__main__":
  tf.test.main()
