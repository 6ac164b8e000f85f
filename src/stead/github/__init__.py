"""GitHub sync: two-way mirroring of branches and tags with a GitHub repository."""
