"""What several tests use: servers and clients to test with, installations, documents, waiting."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
