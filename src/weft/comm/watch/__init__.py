"""The one detector of disagreement: who waits for what, what the ranks agree on, and how a difference is said."""
