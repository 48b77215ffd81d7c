"""Prints the Kubernetes manifests of a training."""

from tf_replicas.programs import manifests

if __name__ == "__main__":
  manifests.main()
