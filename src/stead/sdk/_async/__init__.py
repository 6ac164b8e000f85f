"""The asynchronous client. `scripts/unasync` generates the synchronous one from it: edit this one."""
