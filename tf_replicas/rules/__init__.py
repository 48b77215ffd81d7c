"""When gradients reach the variables: the update rules."""
