"""The asynchronous client. The synchronous one is made from it by `scripts/unasync`: edit this one."""
