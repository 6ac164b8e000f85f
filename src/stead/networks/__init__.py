"""Private networks (VPCs) of accounts."""
