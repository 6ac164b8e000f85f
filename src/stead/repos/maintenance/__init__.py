"""Maintenance: housekeeping of packs and refs, and pruning of unreachable objects."""
