"""Starts a script as all tasks of a cluster on this machine."""

from tf_replicas.programs import script_launcher

if __name__ == "__main__":
  script_launcher.main()
