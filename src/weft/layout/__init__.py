"""Arithmetic: where every element lies, and which memory can be shared. Nothing here communicates."""
