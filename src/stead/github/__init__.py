"""Repositories kept in step with others at GitHub."""
