"""What a person looks at afterwards: the page of a run, its figures, and the times of one step."""
