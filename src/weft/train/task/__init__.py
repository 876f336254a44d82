"""What a loop trains: the text of a configuration, or a model and data of one's own."""
