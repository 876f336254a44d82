"""The processes of a run: how they start, meet and end, and the run's directory."""
