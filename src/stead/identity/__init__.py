"""Authentication and authorisation: accounts, API keys, identities, tokens and permissions."""
