"""Git LFS: object store, pointers in commits, and the client for other servers."""
