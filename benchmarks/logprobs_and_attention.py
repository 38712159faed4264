"""Time and memory of log-probs over a large vocabulary, and of attention over packed batches. Prints one table, last.

    python benchmarks/logprobs_and_attention.py            # one CUDA device, about two minutes
    python benchmarks/logprobs_and_attention.py --tiny     # any machine: the same code on small shapes, no meaning in its times

Log-probs: forward and backward from hidden states and the head's weight, gradients for both. Attention: forward and backward of
a Qwen2 of the 1.5B shape (fewer layers) on samples of mixed length. Peak is what a pass adds to what was allocated before,
gradients included. verl's row loop is measured where verl imports.
"""

from __future__ import annotations

import argparse
import gc
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
import transformers
from transformers import AutoModelForCausalLM, Qwen2Config

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.training import attention, logprobs

GIB = 1024**3


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured."""

    num_tokens: int = 8192
    vocabulary: int = 151_936
    width: int = 1536
    intermediate: int = 8960
    heads: int = 12
    key_heads: int = 2
    layers: int = 8
    lengths: tuple[int, ...] = (2048, 310, 1500, 620, 1980, 90, 1100, 760)
    repeats: int = 5


TINY = Sizes(
    num_tokens=96, vocabulary=512, width=64, intermediate=96, heads=4, layers=2, lengths=(40, 7, 25), repeats=2
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table; None is n/a."""

    what: str
    first_s: float | None = None
    ms: float | None = None
    peak_gib: float | None = None
    error: float | None = None
    note: str = ""


def synchronize(device: torch.device) -> None:
    """Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(
    what: str,
    step: Callable[[], None],
    leaves: Sequence[torch.Tensor],
    device: torch.device,
    repeats: int,
    note: str = "",
) -> Row:
    """Runs a step once cold and a few times warm, each time without gradients in `leaves`."""

    def seconds() -> float:
        for leaf in leaves:
            leaf.grad = None
        synchronize(device)
        start = time.perf_counter()
        step()
        synchronize(device)
        return time.perf_counter() - start

    gc.collect()
    try:
        first_s = seconds()
        peak_gib = added_peak_gib(seconds, leaves) if device.type == "cuda" else None
        warm_s = [seconds() for _ in range(repeats)]
    except ConfigError as refusal:
        return Row(what=what, note=f"refused: {refusal.found}")
    except Exception as failure:
        return Row(what=what, note=f"{type(failure).__name__}: {str(failure).splitlines()[0][:90]}")
    return Row(what=what, first_s=first_s, ms=statistics.median(warm_s) * 1e3, peak_gib=peak_gib, note=note)


def added_peak_gib(run: Callable[[], float], leaves: Sequence[torch.Tensor]) -> float:
    """What a run adds to the memory allocated before it, the gradients that it leaves behind included."""
    for leaf in leaves:
        leaf.grad = None
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return (torch.cuda.max_memory_allocated() - before) / GIB


def verl_row_loop() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """verl's function for machines without flash-attn, or None without verl."""
    try:
        from verl.utils.torch_functional import logprobs_from_logits_v2
    except ImportError:
        return None
    return logprobs_from_logits_v2


def logprob_rows(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Iterator[Row]:
    """Each way from hidden states to the gradients of hidden states and weight."""
    torch.manual_seed(0)
    hidden = torch.randn(sizes.num_tokens, sizes.width, device=device, dtype=dtype).requires_grad_()
    weight = (torch.randn(sizes.vocabulary, sizes.width, device=device) * 0.02).to(dtype).requires_grad_()
    labels = torch.randint(0, sizes.vocabulary, (sizes.num_tokens,), device=device)
    upstream = torch.randn(sizes.num_tokens, device=device)
    reference: list[torch.Tensor] | None = None

    def error_of(log_probs_of: Callable[[], torch.Tensor]) -> float:
        """Largest error of values and gradients against the first way, relative to the largest entry."""
        nonlocal reference
        hidden.grad = weight.grad = None
        log_probs = log_probs_of()
        (log_probs * upstream).sum().backward()
        found = [tensor.float().cpu() for tensor in (log_probs.detach(), hidden.grad, weight.grad)]
        reference = found if reference is None else reference
        return max(
            ((one - other).abs().max() / other.abs().max()).item() for one, other in zip(found, reference, strict=True)
        )

    def timed(log_probs_of: Callable[[], torch.Tensor]) -> Callable[[], None]:
        return lambda: (log_probs_of() * upstream).sum().backward()

    def logits() -> torch.Tensor:
        return F.linear(hidden, weight)

    def with_entropy() -> torch.Tensor:
        log_probs, entropy = logprobs.linear_logprobs(hidden, weight, labels, 0.9)
        return log_probs + 0.001 * entropy

    def fused(**options: object) -> torch.Tensor:
        return logprobs.linear_logprobs(hidden, weight, labels, with_entropy=False, **options)[0]

    row_loop = verl_row_loop()
    ways: list[tuple[str, Callable[[], torch.Tensor], str]] = [
        ("full, plain formula in fp32", lambda: logprobs.plain_logprobs(logits(), labels), "reference"),
        ("F.cross_entropy", lambda: -F.cross_entropy(logits(), labels, reduction="none"), ""),
        ("chunked (ours, logits held once)", lambda: logprobs.logprobs_from_logits(logits(), labels), ""),
        ("fused (ours, no logits)", fused, ""),
        ("fused, not compiled", lambda: fused(compiled=False), ""),
        ("fused, temperature and entropy with gradient", with_entropy, "other function: no error"),
    ]
    if row_loop is None:
        yield Row(what="verl's row loop", note="verl does not import here")
    else:
        ways.insert(1, ("verl's row loop", lambda: row_loop(logits(), labels), ""))
    for what, log_probs_of, note in ways:
        row = measure(f"log-probs: {what}", timed(log_probs_of), (hidden, weight), device, sizes.repeats, note)
        compares = row.ms is not None and "temperature" not in what
        yield replace(row, error=error_of(log_probs_of) if compares else None)


def attention_rows(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Iterator[Row]:
    """The same samples padded and packed, through each implementation that runs here."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=1024,
        hidden_size=sizes.width,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.key_heads,
        max_position_embeddings=max(sizes.lengths),
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(device, dtype).train()
    longest, samples = max(sizes.lengths), [torch.randint(0, 1024, (n,), device=device) for n in sizes.lengths]
    padded = torch.stack([F.pad(sample, (0, longest - len(sample))) for sample in samples])
    mask = torch.stack([torch.arange(longest, device=device) < len(sample) for sample in samples])
    positions = torch.cat([torch.arange(len(sample), device=device) for sample in samples])[None]
    inputs = {
        "padded": {"input_ids": padded, "attention_mask": mask.long()},
        "packed": {"input_ids": torch.cat(samples)[None], "position_ids": positions},
    }
    reference: torch.Tensor | None = None
    attention.register()

    def hidden_of(layout: str) -> torch.Tensor:
        hidden = model.model(**inputs[layout], use_cache=False)[0]
        return hidden[mask] if layout == "padded" else hidden[0]

    for layout, name in (
        ("padded", "sdpa"),
        ("packed", "sdpa"),
        ("packed", "sdpa_packed"),
        ("packed", "varlen"),
        ("padded", "varlen"),
    ):
        model.set_attn_implementation(name)

        def step(layout: str = layout) -> None:
            hidden_of(layout).float().square().mean().backward()

        row = measure(f"attention: {layout}, {name}", step, list(model.parameters()), device, sizes.repeats)
        error = None
        if row.ms is not None:
            with torch.no_grad():
                found = hidden_of(layout).float()
            reference = found if reference is None else reference
            error = ((found - reference).abs().max() / reference.abs().max()).item()
        yield replace(row, error=error)


def render(rows: list[Row]) -> str:
    """The table."""

    def cell(value: float | None, digits: int) -> str:
        return "n/a" if value is None else f"{value:.{digits}f}"

    lines = [
        "| what | first call s | ms | extra peak GiB | largest error, relative | note |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        error = "n/a" if row.error is None else f"{row.error:.1e}"
        cells = (row.what, cell(row.first_s, 1), cell(row.ms, 1), cell(row.peak_gib, 2), error, row.note)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small shapes, any machine")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not arguments.tiny:
        parser.error("no CUDA device: add --tiny")
    sizes, dtype = (TINY if arguments.tiny else Sizes()), (torch.bfloat16 if device.type == "cuda" else torch.float32)
    rows = [*logprob_rows(sizes, device, dtype), *attention_rows(sizes, device, dtype)]
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or "CPU"
    print(f"{name}, torch {torch.__version__}, transformers {transformers.__version__}, {dtype}, {sizes}\n")
    print(render(rows))


if __name__ == "__main__":
    main()
