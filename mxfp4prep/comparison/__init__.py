"""Two audits side by side: what differs, with names that only moved to another root recognised."""

from mxfp4prep.comparison.audit_file import read_audit
from mxfp4prep.comparison.differences import compare

__all__ = ["compare", "read_audit"]
