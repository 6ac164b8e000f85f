"""The database's history, one file for each change of shape."""
