"""Creating VMs: one order becomes a VM with its domains, its NIC and its Git access, or nothing."""
