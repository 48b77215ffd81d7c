"""Reads damaged inputs of every kind, and accepts documented errors only.

  python -m tests.fuzz [--cases=100000] [--seed=0] [--kinds=NAME,...]

A *kind* is an input that the library or its programs read: cluster specs,
environment variables, flags, CIFAR-10 files, TFRecords, files of ImageNet,
checkpoints, tables, records of finished runs, and timelines. For each kind, a
process of its own takes good inputs, damages them at random, and reads them.
Reading must succeed, or raise an error of a documented type with a message of
one line. Anything else is a failure: another exception, a crash of the process,
a case that takes longer than `CASE_SECS`, or more memory than `MEMORY_BYTES`.
"""
