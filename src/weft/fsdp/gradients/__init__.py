"""Gradients: from where autograd leaves them to `.grad` of the registered parameters, and their norms."""
