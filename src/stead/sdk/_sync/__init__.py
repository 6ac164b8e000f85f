"""The synchronous client. It is made from `_async` by `scripts/unasync`: edit that one."""
