"""Mxfp4PrepConfig: the `quantization_config` of a prepared checkpoint, as transformers wants it."""

from __future__ import annotations

from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from mxfp4prep.documents import CONFIG_NAME
from mxfp4prep.errors import InvalidManifest
from mxfp4prep.marks import FORMAT_VERSION, MANIFEST_NAME, QUANT_METHOD
from mxfp4prep.prepared import CONVERT_HINT, check_marks


class Mxfp4PrepConfig(QuantizationConfigMixin):
    """The keys of config.json's `quantization_config`, kept as they are.

    Whether it is all there is checked when the checkpoint is opened.

    Raises InvalidManifest for marks of another version or a key that this one does not know.
    """

    def __init__(
        self,
        format_version: int = FORMAT_VERSION,
        manifest: str = MANIFEST_NAME,
        source_quantization_config: dict[str, Any] | None = None,
        quant_method: str = QUANT_METHOD,
        **unknown: object,
    ) -> None:
        check_marks(
            {"quant_method": quant_method, "format_version": format_version, "manifest": manifest}
        )
        if unknown:
            where = f"{CONFIG_NAME}: quantization_config"
            found = ", ".join(sorted(unknown))
            raise InvalidManifest(where, "unknown keys", found=found, hint=CONVERT_HINT)
        self.quant_method = quant_method  # type: ignore[assignment]  # an Enum of known ones
        self.format_version = format_version
        self.manifest = manifest
        self.source_quantization_config = source_quantization_config
