"""vLLM in child processes: with this package's plugin, with the reference's, or with none."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PREPARED, REFERENCE, NONE = "mxfp4prep", "reference", ""
"""What VLLM_PLUGINS may name."""
TIMEOUT = 900
"""Seconds for all jobs of one call."""

needs_vllm = pytest.mark.skipif(
    find_spec("vllm") is None and not os.environ.get("MXFP4PREP_ENGINES"),
    reason="vLLM is not installed here: `make test-serve`",
)


class Run:
    """What jobs answered, and what the engine said meanwhile.

    results   rank 0's, but "weights" of each rank, and an "error" of any
    """

    def __init__(self, results: list[dict], said: str) -> None:
        self.results, self.said = results, said

    def __getitem__(self, index: int) -> dict:
        return self.results[index]

    def lines(self, *words: str) -> list[str]:
        """The lines of what was said that have all of `words`."""
        return [line for line in self.said.splitlines() if all(word in line for word in words)]


def run_jobs(
    folder: Path, jobs: list[dict], plugins: str = PREPARED, *, spawn: bool = False, **more: str
) -> Run:
    """Runs jobs of vllm_child one after the other. `folder` is for files of the call.

    spawn   vLLM starts its workers itself, as a server does: 20 s and more for each job. Otherwise
            ranks are started here, once, and each is an engine with its worker
    more    environment variables
    """
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [{**job, "port": port} for job, port in zip(jobs, _free_ports(len(jobs)), strict=True)]
    (folder / "jobs.json").write_text(json.dumps(jobs))
    tp = max(job.get("tp", 1) for job in jobs)
    environment = _environment(folder, plugins, tp) | more
    ranks = 1 if spawn else tp
    launched = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    files = [folder / f"said{rank}.txt" for rank in range(ranks)]
    with ExitStack() as stack:
        processes = [
            subprocess.Popen(
                [sys.executable, str(HERE / "vllm_child.py"), "jobs.json", f"results{rank}.json"],
                cwd=folder,
                env=environment
                | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} | launched if ranks > 1 else {}),
                stdout=stack.enter_context(file.open("w")),
                stderr=subprocess.STDOUT,
            )
            for rank, file in enumerate(files)
        ]
        try:
            codes = [process.wait(timeout=TIMEOUT) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
            for path in (path for job in jobs for path in _shared_memory(job["port"])):
                path.unlink()
    said = "".join(file.read_text() for file in files)
    assert codes == [0] * ranks, said[-4000:]
    found = [
        [json.loads(line) for line in (folder / f"results{rank}.json").read_text().splitlines()]
        for rank in range(ranks)
    ]
    assert [len(results) for results in found] == [len(jobs)] * ranks, said[-4000:]
    for of_ranks in zip(*found, strict=True):
        first, errors = of_ranks[0], [each["error"] for each in of_ranks if "error" in each]
        first["weights"] = [each.get("weights") for each in of_ranks]
        first.update({"error": errors[0]} if errors else {})
    return Run(found[0], said)


def facts_of(script: str, *arguments: object, **environment: str) -> dict:
    """What a script beside this file prints, in a process with the plugin and no engine."""
    done = subprocess.run(
        [sys.executable, str(HERE / script), *map(str, arguments)],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "VLLM_PLUGINS": PREPARED,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def _environment(folder: Path, plugins: str, tp: int) -> dict[str, str]:
    """A child's: the reference is an entry point as ours is, of a distribution made here."""
    entry = folder / "site" / "vllm_reference-0.dist-info"
    entry.mkdir(parents=True, exist_ok=True)
    (entry / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-reference\nVersion: 0\n")
    (entry / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\n{REFERENCE} = vllm_reference:register\n"
    )
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(entry.parent), str(HERE), str(ROOT)]),
        "VLLM_PLUGINS": plugins,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        # one core each, so that ranks do not wait for one another
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(tp))),
    }


def _free_ports(count: int) -> list[str]:
    """Ports that nobody listens at, nor has left vLLM's shared memory of: it is named after one."""
    listeners: list[socket.socket] = []
    found: list[str] = []
    try:
        while len(found) < count:
            listeners.append(socket.create_server(("127.0.0.1", 0)))
            port = str(listeners[-1].getsockname()[1])
            if not _shared_memory(port):
                found.append(port)
    finally:
        for listener in listeners:
            listener.close()
    return found


def _shared_memory(port: str) -> list[Path]:
    """What ranks that met at that port share; vLLM's CPU build never removes it."""
    return list(Path("/dev/shm").glob(f"{port}-*-cpushm_*"))
