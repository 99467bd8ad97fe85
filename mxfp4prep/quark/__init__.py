"""Reading Quark: which tensors of a checkpoint are MXFP4, by tensors and config together."""

from mxfp4prep.quark.classification import Classified, QuarkLayer, classify
from mxfp4prep.quark.config import scheme_of_config
from mxfp4prep.quark.schemes import Activation

__all__ = ["Activation", "Classified", "QuarkLayer", "classify", "scheme_of_config"]
