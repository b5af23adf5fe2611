"""What a configuration means: where its values come from, what they do, and what the run costs."""
