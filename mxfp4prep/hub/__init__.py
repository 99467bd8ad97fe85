"""Checkpoints by name: a directory, or a Hub repository of which only headers are read."""

from mxfp4prep.hub.opening import open_source
from mxfp4prep.hub.reading import Progress

__all__ = ["Progress", "open_source"]
