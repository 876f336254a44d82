"""What is recorded while a run goes on, for people and for files."""
