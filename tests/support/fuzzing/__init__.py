"""Fuzzing of what parses bytes of clients, guests, archives and name servers."""
