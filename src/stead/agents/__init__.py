"""Clients that give the agents of other frameworks a VM. Each imports only the SDK and its framework."""
