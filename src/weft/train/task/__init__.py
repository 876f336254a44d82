"""Tasks, each a model with its data and loss: from a configuration, or your own."""
