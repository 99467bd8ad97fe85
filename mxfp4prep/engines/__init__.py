"""What a serving engine does with the original checkpoint: path, error or silent corruption."""

from mxfp4prep.engines.outcomes import PATHS, Outcome, Prediction
from mxfp4prep.engines.prediction import predict
from mxfp4prep.engines.rules import Engine
from mxfp4prep.engines.switches import parse_switches
from mxfp4prep.engines.tables import ENGINES
from mxfp4prep.engines.tuned import Tuned, find_tuned

__all__ = [
    "ENGINES",
    "PATHS",
    "Engine",
    "Outcome",
    "Prediction",
    "Tuned",
    "find_tuned",
    "parse_switches",
    "predict",
]
