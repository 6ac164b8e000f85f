"""Client of the agent inside each VM: commands, files, terminals, logs, identity. Every answer is hostile."""
