"""What is recorded while a run trains, for people and for files."""
