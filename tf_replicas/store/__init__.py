"""Variables on parameter servers, and the optimizers that update them."""
