"""transformers 5 loads prepared checkpoints: `import mxfp4prep.integrations.hf`, nothing more.

transformers finds no quantizer by an entry point, so something has to be imported, once, before
`from_pretrained`; this import is it. Where there is no place for an import (a program that is not
yours), `python -m mxfp4prep.integrations.hf MODULE ...` runs that program with it. Without it
transformers ignores the quantization and then fails on shapes that do not match.
"""

from __future__ import annotations

from mxfp4prep.integrations.hf.configuration import Mxfp4PrepConfig
from mxfp4prep.integrations.hf.quantizer import Mxfp4PrepQuantizer
from mxfp4prep.integrations.hf.registration import register

__all__ = ["Mxfp4PrepConfig", "Mxfp4PrepQuantizer", "register"]

register()
