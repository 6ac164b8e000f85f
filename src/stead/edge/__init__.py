"""The edge: what this installation offers to the network. HTTPS for the API, Git and mapped domains."""
