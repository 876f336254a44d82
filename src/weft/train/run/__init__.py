"""One run as processes: who starts them, how they meet, what ends them, and where the run lives."""
