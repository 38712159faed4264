"""Activation memory and time of every checkpointing policy, in one process, one table last.

    python benchmarks/checkpointing.py            # one CUDA device, 1.5B, 8 x 2048 tokens, bf16
    python benchmarks/checkpointing.py --tiny     # CPU, seconds: shows that it runs, not what it costs

A random Qwen2 of the given shape, forward and backward on the hidden states (no logits), sdpa. Columns: bytes kept
between forward and backward; peak of all memory; median time of five steps; the first call, compilation included; the
same for packed batches of ever new lengths (one row, median from the third on), and how often these were recompiled.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from verl_ext_sharding.training.checkpointing import Budget, EveryN, Full, Off, Policy, Selective, recompiles, remove
from verl_ext_sharding.training.offload import ActivationOffload
from verl_ext_sharding.training.saved_bytes import LiveStorages

GIB = 2**30


@dataclass(frozen=True)
class Case:
    name: str
    policy: Policy
    offload: bool = False
    liger: bool = False


CASES = [
    Case("none", Off()),
    Case("full", Full()),
    Case("every 2nd", EveryN(2)),
    Case("selective: attention, matmul", Selective()),
    Case("selective: attention, narrow matmul", Selective(("attention", "narrow_matmul"))),
    Case("selective: attention", Selective(("attention",))),
    *(Case(f"budget {share}", Budget(share=share)) for share in (0.7, 0.5, 0.3, 0.2, 0.1, 0.05, 0.0)),
    Case("budget 12 GiB", Budget(kept_bytes=12 * GIB)),
    Case("budget 0.3, eager", Budget(share=0.3, compile=False)),
    Case("full + offload", Full(), offload=True),
    Case("budget 0.1 + offload", Budget(share=0.1), offload=True),
    Case("Liger, none", Off(), liger=True),
    Case("Liger, full", Full(), liger=True),
    Case("Liger, budget 0.1", Budget(share=0.1), liger=True),
]


@dataclass
class Row:
    name: str
    kept_bytes: int
    peak_bytes: int | None
    step_s: float
    first_s: float
    packed_s: float
    packed_recompiles: int


class Bench:
    """One model on one device, run case after case."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device("cpu" if args.tiny else "cuda")
        self.dtype = torch.float32 if args.tiny else torch.bfloat16
        self.model = self.build()
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randint(0, self.model.config.vocab_size, (args.rows, args.tokens), generator=generator)

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        args = self.args
        config = Qwen2Config(
            hidden_size=args.hidden,
            num_hidden_layers=args.layers,
            num_attention_heads=args.heads,
            num_key_value_heads=args.kv_heads,
            intermediate_size=args.intermediate,
            vocab_size=args.vocab,
            max_position_embeddings=args.rows * args.tokens,
        )
        config._attn_implementation = "sdpa"
        with self.device:
            return Qwen2ForCausalLM(config).to(self.dtype).train()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.model.model(input_ids.to(self.device), use_cache=False).last_hidden_state
        return hidden.float().square().mean()

    def step(self, input_ids: torch.Tensor) -> float:
        self.model.zero_grad(set_to_none=True)
        self.synchronize()
        start = time.perf_counter()
        self.forward(input_ids).backward()
        self.synchronize()
        return time.perf_counter() - start

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def kept_bytes(self) -> int:
        self.model.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            before = torch.cuda.memory_allocated()
            loss = self.forward(self.rows)
            self.synchronize()
            kept = torch.cuda.memory_allocated() - before
        else:
            with LiveStorages() as made:
                loss = self.forward(self.rows)
            kept = made.total_bytes()
        del loss
        return kept

    def run(self, case: Case) -> Row:
        torch._dynamo.reset()
        gc.collect()
        if case.liger:
            from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

            _apply_liger_kernel_to_instance(model=self.model, fused_linear_cross_entropy=False)
        case.policy.apply(self.model)
        if case.offload:
            ActivationOffload().apply(self.model)
        try:
            return self.measure(case)
        finally:
            ActivationOffload().remove(self.model)
            remove(self.model)

    def measure(self, case: Case) -> Row:
        first = self.step(self.rows)
        self.step(self.rows)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        steps = [self.step(self.rows) for _ in range(5)]
        peak = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else None
        kept = self.kept_bytes()
        total = self.rows.numel()
        lengths = [total - total * part // 64 for part in (3, 8, 0, 5, 1, 2, 6)]
        flat = self.rows.reshape(1, -1)
        seconds_per_token, counted = [], 0
        for index, length in enumerate(lengths):
            if index == 2:
                counted = recompiles(self.model)
            seconds_per_token.append(self.step(flat[:, :length]) / length)
        return Row(
            name=case.name,
            kept_bytes=kept,
            peak_bytes=peak,
            step_s=statistics.median(steps),
            first_s=first,
            packed_s=statistics.median(seconds_per_token[2:]) * total,
            packed_recompiles=recompiles(self.model) - counted,
        )


def table(rows: list[Row], unit: str) -> str:
    size = {"MiB": 2**20, "GiB": GIB}[unit]
    header = ["policy", f"kept {unit}", "saved %", f"peak {unit}", "ms", "first s", "packed ms", "recompiled"]
    none = rows[0].kept_bytes
    cells = [
        [
            row.name,
            f"{row.kept_bytes / size:.2f}",
            f"{100 * (1 - row.kept_bytes / none):.0f}",
            "n/a" if row.peak_bytes is None else f"{row.peak_bytes / size:.1f}",
            f"{1000 * row.step_s:.0f}",
            f"{row.first_s:.1f}",
            f"{1000 * row.packed_s:.0f}",
            str(row.packed_recompiles),
        ]
        for row in rows
    ]
    widths = [max(len(line[column]) for line in [header, *cells]) for column in range(len(header))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in [header, ["-" * width for width in widths], *cells]
    ]
    return "\n".join(lines)


def importable(module: str) -> bool:
    try:
        __import__(module)
    except Exception:
        return False
    return True


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a toy on the CPU")
    parser.add_argument("--only", default="", help="run the cases whose name contains this; `none` always runs")
    for name, size, help_text in (
        ("hidden", 1536, "hidden size"),
        ("layers", 28, "number of layers"),
        ("heads", 12, "attention heads"),
        ("kv-heads", 2, "key/value heads"),
        ("intermediate", 8960, "width of the MLP"),
        ("vocab", 32768, "entries of the embedding; no logits are made"),
        ("rows", 8, "rows of a batch"),
        ("tokens", 2048, "tokens of a row"),
    ):
        parser.add_argument(f"--{name}", type=int, default=size, help=f"{help_text} (default {size})")
    args = parser.parse_args()
    if args.tiny:
        args.hidden, args.layers, args.heads, args.kv_heads, args.intermediate = 64, 4, 4, 2, 128
        args.vocab, args.rows, args.tokens = 128, 2, 64
    return args


def main() -> None:
    args = arguments()
    bench = Bench(args)
    has_liger = importable("liger_kernel.transformers")
    selected: Callable[[Case], bool] = lambda case: case.name == "none" or args.only in case.name  # noqa: E731
    rows = []
    for case in CASES:
        if selected(case) and (has_liger or not case.liger):
            rows.append(bench.run(case))
            print(rows[-1], file=sys.stderr)
    where = "CPU" if args.tiny else torch.cuda.get_device_name()
    print(
        f"{where}, torch {torch.__version__}, {args.layers} layers, {args.rows} x {args.tokens} tokens, {bench.dtype}"
    )
    print(table(rows, "MiB" if args.tiny else "GiB"))


if __name__ == "__main__":
    main()
