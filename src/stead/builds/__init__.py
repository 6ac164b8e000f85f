"""Builds: from the spec of a VM or a snapshot to the VM or snapshot itself."""
