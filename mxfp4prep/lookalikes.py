"""What a file is that should have been safetensors, by its first bytes: so that people are told."""

from __future__ import annotations

_AGAIN = "download the file again"
_CONVERT = "convert it to safetensors first"
_LOOKALIKES = {  # first bytes in lower case -> what the file is, the way out
    b"version https://git-lfs": (
        "a git-lfs pointer, not the file it stands for",
        "run `git lfs pull` in the repository, or download the file again",
    ),
    b"pk\x03\x04": ("not safetensors, but a zip archive as torch.save writes", _CONVERT),
    **dict.fromkeys(
        (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"),
        ("not safetensors, but a pickle as torch.save writes", _CONVERT),
    ),
    b"\x93numpy": ("not safetensors, but a NumPy array", _CONVERT),
    b"gguf": ("not safetensors, but GGUF", "use the safetensors checkpoint of this model"),
    b"\x1f\x8b": ("not safetensors, but gzip data", "decompress it first"),
    b"<": ("not safetensors, but an HTML or XML page, such as a server's error", _AGAIN),
    b"{": ("not safetensors, but plain JSON text", _AGAIN),
}


def recognise(prefix: bytes) -> tuple[str, str] | None:
    """(what the file is, the way out) by its first bytes, or None when they are not known."""
    start = prefix.lower()
    for magic, answer in _LOOKALIKES.items():
        if start.startswith(magic) or (magic == b"<" and start.lstrip().startswith(magic)):
            return answer
    return None
