"""`python -m mxfp4prep.schemas` writes the schema files anew; `--check` only compares them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from mxfp4prep import manifest
from mxfp4prep.report import contract
from mxfp4prep.schemas import DOCUMENTS, read

TYPES: dict[str, Any] = {
    "audit": contract.AuditDocument,
    "diff": contract.DiffDocument,
    "plan": contract.PlanDocument,
    "convert": contract.ConvertDocument,
    "verify": contract.VerifyDocument,
    "restore": contract.RestoreDocument,
    "selfcheck": contract.SelfcheckDocument,
    "bench": contract.BenchDocument,
}


def generate(document: str) -> str:
    """The schema of one of DOCUMENTS as its types have it now, as JSON text."""
    if document == "show":
        schema = manifest.json_schema()
    else:
        schema = TypeAdapter(TYPES[document]).json_schema()
        schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
        schema["title"] = f"mxfp4prep {document}"
    return json.dumps(schema, indent=1, sort_keys=True) + "\n"


def main(words: list[str]) -> int:
    """Writes every file, or with `--check` says which are not current; returns the exit code."""
    stale = []
    for document in DOCUMENTS:
        text = generate(document)
        path = Path(__file__).with_name(f"{document}.schema.json")
        if words != ["--check"]:
            path.write_text(text)
        elif not path.is_file() or read(document) != text:
            stale.append(path.name)
    if stale:
        sys.stderr.write(f"error: not current: {', '.join(stale)}\n")
        sys.stderr.write("hint: python -m mxfp4prep.schemas\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
