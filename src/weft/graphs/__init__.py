"""Partial graphs: parts of a model that are captured once and replayed."""
