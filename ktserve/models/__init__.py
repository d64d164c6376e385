"""Models: where they come from, what can be served, and how they are loaded."""
