"""Prepared checkpoints inside other engines: thin, the runtime does the work. Each engine's part is
imported by that engine alone."""
