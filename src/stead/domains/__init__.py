"""Domains: verification of ownership, preview zones, and host names mapped to ports of VMs."""
