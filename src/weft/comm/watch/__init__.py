"""The hang detector: finds ranks that wait for different collectives, and raises errors that name them."""
