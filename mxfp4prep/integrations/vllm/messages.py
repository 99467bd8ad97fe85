"""What the plugin says: in vLLM's log, and in several errors."""

from __future__ import annotations

from collections.abc import Iterable

from vllm.logger import init_logger

logger = init_logger("vllm.mxfp4prep")  # below "vllm": the handlers are there

NO_PLACE = "vLLM's module has no place for it"
NOT_STORED = "vLLM's module needs it, but the checkpoint does not have it"
NOT_STORED_HINT = "its config.json may be that of another model"


def tell_repacking(where: str, tp_rank: int, tp_size: int, reasons: Iterable[str]) -> None:
    """One warning for a module whose stored layout cannot be sliced; all ranks repack alike, and
    the first one says so."""
    if tp_rank == 0:
        logger.warning(
            "%s: read whole and repacked for the Triton path on %d ranks: %s",
            where,
            tp_size,
            "; ".join(reasons),
        )


def tell_backend(path: str, backend: str) -> None:
    """Once for each path and backend."""
    logger.info_once("MXFP4 layers of path %s run on backend %s", path, backend)
