"""Starts a script as all tasks of a cluster: see `script_launcher`."""

from tf_replicas.programs import script_launcher

if __name__ == "__main__":
  script_launcher.main()
