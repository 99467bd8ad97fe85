"""Tensor parallelism: every rank reads its piece of each layer, and the sums equal the whole.

    torchrun --nproc-per-node 2 examples/06_tensor_parallel.py [PREPARED_DIR]

Without an argument it prepares a small checkpoint first. Runs on 1, 2 or 4 ranks, on NCCL where
each has a GPU, else on gloo and the CPU. Exits with 1 where a sum differs, 2 where layers cannot
be cut for so many ranks, with an error's own code for any other one.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import mxfp4prep
from mxfp4prep.checkpoint import open_checkpoint
from mxfp4prep.convert import convert
from mxfp4prep.parallel import Topology
from mxfp4prep.plan import make_plan, surveyed_degrees
from mxfp4prep.safefile import TensorEntry, encode_header
from mxfp4prep.survey import survey

TOKENS, TOP = 64, 2
SAME_CODES = 1e-5
"""Largest error of one layer, over the norm of its whole output. The ranks quantize the same
32-groups of the same input: all FP4 codes are equal, and only float32 additions are reordered."""
SAME_UP_TO_ROUNDING = 1e-2
"""The same of layers in a row. What lies between them is quantized too: where a reordered addition
moves a value over a rounding border, one code of thousands differs. A wrong piece is off by 1.
AITER rounds outputs to bfloat16, which costs 2^-9 a layer."""


def family(
    prepared: mxfp4prep.Prepared, last: str, *firsts: tuple[str, ...]
) -> list[mxfp4prep.PreparedLinear]:
    """The first layer called `last` and the first choice of layers beside it, [] where none is."""
    for name in prepared:
        beside = name.removesuffix(last)
        for parts in firsts:
            names = [f"{beside}{part}_proj" for part in parts]
            if name.endswith(last) and all(each in prepared for each in names):
                return [prepared[each] for each in (name, *names)]
    return []


def partials(prepared: mxfp4prep.Prepared, rank: int) -> Iterator[tuple[str, float, Tensor]]:
    """(what, bound, what this rank adds to the output) of each block that the checkpoint has."""
    tp, device = prepared.tp_size, prepared.device
    generator = torch.Generator().manual_seed(0)

    def inputs(width: int) -> Tensor:
        return torch.randn((TOKENS, width), generator=generator).to(device)

    mlp = family(prepared, "mlp.down_proj", ("mlp.gate_up",), ("mlp.gate", "mlp.up"))
    if mlp:
        down, *ups = mlp
        exact = SAME_UP_TO_ROUNDING if down.backend == "aiter" else SAME_CODES
        own = slice(rank * down.k, (rank + 1) * down.k)
        x = inputs(ups[0].k)
        halves = torch.cat([layer(x) for layer in ups], dim=-1).view(TOKENS, 2, down.k)
        columns = torch.zeros((TOKENS, 2, down.k * tp), device=device)
        columns[..., own] = halves
        yield "gate and up, column-parallel", exact, columns
        yield "down, row-parallel", exact, down(inputs(down.k * tp)[:, own])
        gate, up = halves.unbind(1)
        yield "gate and up, then down", SAME_UP_TO_ROUNDING, down(F.silu(gate) * up)

    counts = Topology.from_config(prepared.config)
    heads, kv_heads = max(1, counts.heads // tp), max(1, counts.kv_heads // tp)
    attention = family(prepared, "attn.o_proj", ("attn.qkv",), ("attn.q", "attn.k", "attn.v"))
    if attention and sum(layer.n for layer in attention[1:]) * heads == attention[0].k * (
        heads + 2 * kv_heads
    ):
        o, *qkv = attention
        x = inputs(qkv[0].k)
        rows = torch.cat([layer(x) for layer in qkv], dim=-1)
        by_head = rows.view(TOKENS, heads + 2 * kv_heads, -1).transpose(0, 1)
        q, k, v = by_head.split((heads, kv_heads, kv_heads))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        added = o(mixed.transpose(0, 1).reshape(TOKENS, -1))
        yield "qkv, attention, then o", SAME_UP_TO_ROUNDING, added

    for prefix in prepared.expert_prefixes[:1]:
        moe = prepared.experts(prefix)
        scores = torch.rand((TOKENS, moe.experts), generator=generator).to(device)
        weights, ids = scores.topk(min(TOP, moe.experts))
        yield "experts", SAME_UP_TO_ROUNDING, moe(inputs(moe.hidden), weights, ids)


def error(found: Tensor, whole: Tensor) -> float:
    """|found - whole| / |whole|, norms; NaN is no small error."""
    return float((found - whole).norm() / whole.norm())


def compare(root: str, device: torch.device) -> bool:
    """Adds up what all ranks compute; whether it is what rank 0 computes from the whole."""
    rank, world = dist.get_rank(), dist.get_world_size()
    prepared = mxfp4prep.load(root, device, tp_rank=rank, tp_size=world)
    blocks = list(partials(prepared, rank))
    if not blocks:
        sys.exit(f"{root}: no MXFP4 block that this example knows")
    read = torch.zeros(world, dtype=torch.int64, device=device)
    read[rank] = prepared.bytes_read
    for tensor in (read, *(output for _, _, output in blocks)):
        dist.all_reduce(tensor)
    equal = torch.ones((), device=device)
    if rank == 0:
        whole = mxfp4prep.load(root, device)
        for (what, bound, output), (_, _, expected) in zip(blocks, partials(whole, 0), strict=True):
            relative = error(output, expected)
            verdict = "equal" if relative <= bound else "MISMATCH"
            print(f"{what}: error {relative:.1e}, at most {bound:.0e}: {verdict}")
            equal *= relative <= bound
        for number, nbytes in enumerate(read.tolist()):
            share = nbytes / whole.bytes_read
            print(f"rank {number} read {nbytes:,} of {whole.bytes_read:,} bytes ({share:.1%})")
        verb = "equal" if equal else "DIFFER from"
        ranks = "1 rank" if world == 1 else f"{world} ranks"
        print(f"{len(blocks)} blocks on {ranks}, {dist.get_backend()}: sums {verb} the whole")
    dist.broadcast(equal, 0)
    return bool(equal)


def prepare(folder: Path, world: int) -> Path:
    """A small prepared checkpoint in `folder`: fused qkv with one KV head, an MLP, experts."""
    hidden, width, heads, head, experts = 512, 1024, 8, 64, 4
    shapes = {
        "0.self_attn.qkv_proj": ((heads + 2) * head, hidden),
        "0.self_attn.o_proj": (hidden, heads * head),
    }
    for block in ("0.mlp", *(f"1.mlp.experts.{expert}" for expert in range(experts))):
        shapes |= {f"{block}.{part}_proj": (width, hidden) for part in ("gate", "up")}
        shapes[f"{block}.down_proj"] = (hidden, width)
    tensors = {}
    for name, (n, k) in shapes.items():
        tensors[f"model.layers.{name}.weight"] = torch.randint(0, 256, (n, k // 2)).byte()
        tensors[f"model.layers.{name}.weight_scale"] = torch.randint(119, 123, (n, k // 32)).byte()
    weight = {"dtype": "fp4", "is_dynamic": False, "qscheme": "per_group", "group_size": 32}
    weight |= {"ch_axis": -1, "scale_format": "e8m0", "scale_calculation_mode": "even"}
    layer = {"weight": weight, "input_tensors": {**weight, "is_dynamic": True}}
    config = {
        "model_type": "qwen3_moe",
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": 1,
        "head_dim": head,
        "quantization_config": {"quant_method": "quark", "global_quant_config": layer},
    }
    source = folder / "model"
    source.mkdir()
    write(source / "model.safetensors", tensors)
    (source / "config.json").write_text(json.dumps(config))
    tp = (1, world)
    plan = make_plan(survey(open_checkpoint(source), surveyed_degrees(tp)), tp)
    return convert(plan, folder / "prepared").out


def write(path: Path, tensors: dict[str, Tensor]) -> None:
    """A safetensors file of uint8 tensors; safetensors' own `save_file` needs numpy."""
    entries, end = [], 0
    for name, tensor in tensors.items():
        entries.append(TensorEntry(name, "U8", tuple(tensor.shape), end, end + tensor.nbytes))
        end += tensor.nbytes
    parts = (bytes(tensor.flatten().tolist()) for tensor in tensors.values())
    path.write_bytes(encode_header(entries, {"format": "pt"}) + b"".join(parts))


def from_rank_0(path: str, device: torch.device) -> str:
    """Rank 0's `path` on every rank; torch's `broadcast_object_list` needs numpy."""
    letters = torch.zeros(4096, dtype=torch.uint8)
    if dist.get_rank() == 0:
        own = os.fsencode(path)
        letters[: len(own)] = torch.tensor(list(own))
    letters = letters.to(device)
    dist.broadcast(letters, 0)
    return os.fsdecode(bytes(letters.tolist()).rstrip(b"\0"))


def join() -> torch.device:
    """Joins the ranks that torchrun started (or none); the device of this one."""
    if not dist.is_torchelastic_launched():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return torch.device("cpu")
    world = int(os.environ["WORLD_SIZE"])
    if torch.cuda.device_count() < world:
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def main() -> int:
    device = join()
    rank, world = dist.get_rank(), dist.get_world_size()
    with tempfile.TemporaryDirectory() as folder:
        if len(sys.argv) > 1:
            root = sys.argv[1]
        else:
            root = from_rank_0(str(prepare(Path(folder), world)) if rank == 0 else "", device)
        try:
            code = 0 if compare(root, device) else 1
        except mxfp4prep.CannotShard as refusal:
            code = 2
            if rank == 0:
                print(f"cannot be cut for {world} ranks: {refusal}; {refusal.hint}")
        except mxfp4prep.Mxfp4PrepError as error:
            code = error.exit_code
            if rank == 0:
                hint = f"\nhint: {error.hint}" if error.hint else ""
                print(f"error: {error}{hint}", file=sys.stderr)
        sys.stdout.flush()  # torchrun ends all ranks as soon as one of them fails
        dist.barrier()
    dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
