"""Stead: real Linux computers for programs and AI agents, on machines you own."""
