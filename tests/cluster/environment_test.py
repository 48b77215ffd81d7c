"""The role of a process, by its environment."""

import json
import tempfile

from absl.testing import absltest
from absl.testing import parameterized

from tf_replicas import cluster
from tf_replicas.cluster import environment

_JOBS = {"ps": ["localhost:1001"], "worker": ["localhost:1002"] * 1}


class RoleTest(parameterized.TestCase):
  """The launcher's variables come before TF_CONFIG."""

  def _file(self):
    directory = self.enter_context(tempfile.TemporaryDirectory())
    path = f"{directory}/spec.json"
    with open(path, "w", encoding="utf-8") as file:
      json.dump({"cluster": _JOBS}, file)
    return path

  def test_alone(self):
    self.assertIsNone(environment.role({}))

  def test_of_the_launcher(self):
    spec, task = environment.role(
      {
        environment.CLUSTER_SPEC: self._file(),
        environment.TASK: "worker:0",
        "TF_CONFIG": "not read",
      }
    )
    self.assertEqual(spec.address(task), "localhost:1002")

  def test_the_spec_itself(self):
    environ = {
      environment.CLUSTER_SPEC: json.dumps({"cluster": _JOBS}),
      environment.TASK: "ps:0",
    }
    spec, task = environment.role(environ)
    self.assertEqual(spec.address(task), "localhost:1001")
    environ[environment.CLUSTER_SPEC] += "}"
    with self.assertRaisesRegex(
      cluster.ClusterError, "^TF_REPLICAS_CLUSTER_SPEC"
    ):
      environment.role(environ)

  def test_a_worker_that_joins(self):
    environ = {
      environment.CLUSTER_SPEC: self._file(),
      environment.TASK: "worker:2",
      environment.MAX_WORKERS: "3",
    }
    spec, task = environment.role(environ)
    self.assertEqual(task, cluster.Task("worker", 2))
    self.assertStartsWith(spec.address(task), "localhost:")
    self.assertEqual(spec.joining, (cluster.Task("worker", 1),))
    for wrong in ("many", "-1"):
      environ[environment.MAX_WORKERS] = wrong
      with self.assertRaisesRegex(cluster.ClusterError, "a number of workers"):
        environment.role(environ)

  def test_of_tf_config(self):
    config = {"cluster": _JOBS, "task": {"type": "ps", "index": 0}}
    _, task = environment.role({"TF_CONFIG": json.dumps(config)})
    self.assertEqual(task, cluster.Task("ps", 0))

  @parameterized.parameters(
    ("worker", "must be a job and an index.*Received: 'worker'"),
    ("worker:x", "must be a job and an index"),
    ("worker:3", "`task_index` must be one of 0"),
    ("judge:0", "`job_name` must be one of"),
    ("", "`TF_REPLICAS_TASK` must be set"),
  )
  def test_refused(self, task, words):
    with self.assertRaisesRegex(cluster.ClusterError, words):
      environment.role(
        {environment.CLUSTER_SPEC: self._file(), environment.TASK: task}
      )


if __name__ == "__main__":
  absltest.main()
