"""Transfer of repositories: serving git clients, remotes, imports, archives and bundles."""
