"""Builds: from the spec of a machine or a snapshot to the thing itself."""
