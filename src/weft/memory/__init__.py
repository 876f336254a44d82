"""Bytes that live for a moment, and where they stay."""
