"""verl's engines with one device and with their layers on two places, on a GPU machine; writes what they did as JSON.

Run as `python -m tests.gpu.device_map_runs <file> [second place: cpu, or 1 for a second GPU]` in a process of its own.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests import ranks
from tests.verl import engine_runs
from tests.verl.engine_cases import POLICIES, Case, Size
from verl_ext_sharding import envs
from verl_ext_sharding.config.measures import LayerSpread, RoleMeasures
from verl_ext_sharding.demo import assets

SHAPE = assets.TinyModel(
    num_layers=8, hidden_size=1024, intermediate_size=4096, num_heads=16, num_kv_heads=4, vocab_size=32000
)
FEW = Size(sequences=2, prompt=(8, 16), response=(8, 24))
"""So few tokens that activations are nothing beside the weights."""

FUSED = {"fused": True, "eps": 1e-3}
"""An optimizer step without temporaries, so that a peak is what the table counts; eps as in `engine_runs`."""


def cases(second: str) -> list[Case]:
    """Actor and critic, with full and budget checkpointing: by FSDP2, without it on one device, and over two places."""
    place: Any = second if second == "cpu" else int(second)
    devices = (0,) if second == "cpu" else (0, 1)
    found = []
    for role, head in (("actor", "lm_head"), ("critic", "score")):
        layers = {"embed": 0, "layers 0-3": 0, "layers 4-7": place, "norm": place, head: place}
        spread = LayerSpread(device_map=layers, devices=devices)
        for name in ("none", "full", "share"):
            checkpointing = POLICIES.get(name)
            measures = RoleMeasures(checkpointing=checkpointing, logits="chunked" if role == "actor" else None)
            one = Case(
                name=f"{role}_{name}", role=role, measures=measures, model={"use_remove_padding": False}, size=FEW
            )
            whole = LayerSpread(device_map={"": 0}, devices=devices)
            found += [
                one,
                replace(one, name=f"{one.name}_whole", measures=replace(measures, layers=whole)),
                replace(one, name=f"{one.name}_spread", measures=replace(measures, layers=spread)),
            ]
    return found


def gradients(run: engine_runs.Run) -> dict[str, Any]:
    """Gradients of one mini-batch, whole and on the host."""
    engine = run.engine
    config = engine.engine_config
    data = run.data(
        0,
        use_remove_padding=False,
        use_fused_kernels=config.use_fused_kernels,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=config.micro_batch_size_per_gpu,
    )
    with engine.train_mode(disable_auto_offload=True):
        engine.forward_backward_batch(data, run.worker.loss_fn)
        found = {
            name: (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).cpu().clone()
            for name, p in engine.module.named_parameters()
        }
        engine.optimizer_zero_grad()
    return found


def run_case(case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors, and numbers."""
    import torch

    torch._dynamo.reset()  # compiled layers hold the weights of the case before
    gc.collect()
    torch.cuda.empty_cache()
    devices = range(torch.cuda.device_count())
    before = [torch.cuda.memory_allocated(device) for device in devices]
    run = engine_runs.Run(case, 0)
    loaded = [torch.cuda.memory_allocated(device) - before[device] for device in devices]
    inferred = {name: value.cpu() for name, value in run.infer().items()}
    tensors = {"inferred": inferred, "gradients": gradients(run)}
    steps = [run.train(0)]
    for device in devices:
        torch.cuda.reset_peak_memory_stats(device)
    steps.append(run.train(1))
    peak = [torch.cuda.max_memory_allocated(device) - before[device] for device in devices]
    tensors["weights"] = {name: value.cpu() for name, value in run.weights().items()}
    numbers: dict[str, Any] = {"steps": steps, "loaded_bytes": loaded, "peak_bytes": peak}
    if case.measures.layers is not None:
        numbers["rows"] = [vars(row) for row in run.engine.rows()]
        numbers["places"] = {name: str(p.device) for name, p in run.engine.module.named_parameters()}
    return tensors, numbers


def main(file: Path, second: str) -> None:
    """Runs the cases and writes numbers and differences."""
    import torch

    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(name, value)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ.setdefault("MASTER_PORT", str(free.getsockname()[1]))
    found = cases(second)
    os.environ[envs.SPEC] = engine_runs.spec_of(found[0]).to_json()
    import verl.workers.engine_workers  # noqa: F401  (loads the plugin; verl keeps import errors, and they this frame)

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl")
    engine_runs.folder_of = lambda _: assets.build(SHAPE)
    engine_runs.ADAM = FUSED
    results: dict[str, Any] = {}
    made: dict[str, dict[str, Any]] = {}
    for case in found:
        started = time.monotonic()
        made[case.name], results[case.name] = run_case(case)
        print(f"{case.name}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
        one = case.name.removesuffix("_spread").removesuffix("_whole")
        if one != case.name:
            results[case.name]["difference"] = engine_runs._differences(made.pop(case.name), made[one])
    file.write_text(json.dumps(results, indent=1))
    ranks.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "cpu")
