"""What a prepared checkpoint is recognised by: the names of its own files, its method, its version.

They stand apart from the manifest's model, so that recognising one costs no model.
"""

from __future__ import annotations

FORMAT_VERSION = 1
QUANT_METHOD = "mxfp4prep"
MANIFEST_NAME = "mxfp4prep.json"
DIGESTS_NAME = "mxfp4prep.digests.json"
DIGEST_ALGORITHM = "xxh3_128"
SUMS_NAME = "SHA256SUMS"
SOURCE_DIR = "source"
PAGE_GENERATOR = "mxfp4prep audit"
"""What the page of an audit says it was made by; such a page may be replaced by another."""
HEADER_SUFFIX = ".header"
"""`source/<shard>.header` keeps a safetensors header whose spelling is not the usual one."""
