"""Who may do what: accounts and their keys, identities with tokens and permissions."""
