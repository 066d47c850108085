"""What was said since, and answers to the questions that the papers leave open."""
