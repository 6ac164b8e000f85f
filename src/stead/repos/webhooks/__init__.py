"""Webhooks: push triggers, the delivery queue, retries and signatures."""
