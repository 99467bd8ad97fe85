"""Serve time: load a prepared checkpoint, cut it for a rank, run its GEMMs."""
