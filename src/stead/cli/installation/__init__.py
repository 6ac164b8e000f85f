"""Commands that work on the installation of this host, not through its API."""
