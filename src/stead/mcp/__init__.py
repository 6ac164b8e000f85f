"""The MCP server of `stead mcp`: VMs, commands, files, processes, repositories and URLs as tools.

A client of the HTTP API like any other: it uses the SDK with the credentials of its caller.
"""
