"""What all training binaries share: options, tasks, launcher, flags."""
