"""Training that finds its role: `fit` for Keras models, `run` for others."""
