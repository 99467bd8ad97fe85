"""Quark's own quantizer in transformers, kept from reading a prepared checkpoint as Quark's.

transformers before 5.24 compares no shapes where a quantizer is at work, so that a prepared
directory whose config.json was replaced by the source's would be read, in the wrong byte order.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.quantizers.quantizer_quark import QuarkHfQuantizer

from mxfp4prep.marks import MANIFEST_NAME
from mxfp4prep.prepared import open_prepared

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class WaryQuarkQuantizer(QuarkHfQuantizer):
    """transformers' quantizer for Quark checkpoints, for everything but prepared ones."""

    def preprocess_model(self, model: PreTrainedModel, *rest: Any, **more: Any) -> None:  # noqa: ANN401
        """As transformers does. Raises InvalidManifest where a manifest of ours lies beside the
        shards."""
        for file in (more.get("checkpoint_files") or ())[:1]:
            root = Path(file).parent
            if (root / MANIFEST_NAME).is_file():
                open_prepared(root)  # says that config.json was replaced
        super().preprocess_model(model, *rest, **more)
