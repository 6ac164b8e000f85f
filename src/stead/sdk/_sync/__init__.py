"""The synchronous client. `scripts/unasync` generates it from `_async`: edit that one."""
