"""The SSH gateway: one address for all VMs, relayed to the OpenSSH server inside each."""
