"""Git repositories: who has them, what is in them, and every change to them. Git itself does the work."""
