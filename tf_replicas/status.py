"""Prints what a running training does, from outside."""

from tf_replicas.programs import status_report

if __name__ == "__main__":
  status_report.main()
