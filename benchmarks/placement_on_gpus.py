"""PPO of verl on GPUs, roles placed in several ways: devices read back, peak memory, step time by phase.

    python benchmarks/placement_on_gpus.py                      # every layout that fits the GPUs there are
    python benchmarks/placement_on_gpus.py --layouts split,hf --model 1.5B --steps 3
    python benchmarks/placement_on_gpus.py --layouts plain,measures --pin    # each on a GPU of its own, at once
    python benchmarks/placement_on_gpus.py --layouts colocated,split,overlap --same-samples --parallel --steps 1
    NCCL_P2P_DISABLE=1 python benchmarks/placement_on_gpus.py --layouts overlap    # without peer access
    python benchmarks/placement_on_gpus.py --layouts capped,wrong            # jobs that must fail, and how they do

A random Qwen2 of a real shape (nothing is downloaded), a rule reward, one job after the other (`--parallel`: all at
once, which only makes sense where every layout is to be seen working, not timed). One table last, and how far the first
steps of several layouts are apart. Kernels round by how many requests are computed together, and where one token turns out
another its whole sample does; with `--same-samples` vLLM's kernels don't (`VLLM_BATCH_INVARIANT`, slower), and first steps
further apart than `TOLERANCE` are a failure.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from importlib import util
from pathlib import Path

import psutil

from verl_ext_sharding.communication import hygiene
from verl_ext_sharding.demo import assets
from verl_ext_sharding.monitor import events

SHAPES = {
    "tiny": {"hidden_size": 256, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 512},
    "0.5B": {
        "hidden_size": 896,
        "num_layers": 24,
        "num_heads": 14,
        "num_kv_heads": 2,
        "intermediate_size": 4864,
        "tied": True,
    },
    "1.5B": {
        "hidden_size": 1536,
        "num_layers": 28,
        "num_heads": 12,
        "num_kv_heads": 2,
        "intermediate_size": 8960,
        "tied": True,
    },
}

LAYOUTS: dict[str, dict[str, list[int]]] = {
    "colocated": {},
    "split": {"actor": [0], "critic": [1], "ref": [1]},
    "overlap": {"actor": [0, 1], "critic": [1], "ref": [0]},
    "spread": {"actor": [0, 1], "critic": [0, 1], "ref": [1]},
    "one": {"actor": [0], "critic": [0], "ref": [0]},
    "hf": {"actor": [0], "critic": [0], "ref": [0]},
    "plain": {},
    "measures": {},
    "capped": {"actor": [0, 1], "critic": [1], "ref": [0]},
    "wrong": {},
}
EXTRA = {
    "spread": ["sharding.roles.actor.layout=device_map", "sharding.roles.critic.layout=device_map"],
    "measures": [
        f"sharding.roles.{role}.{line}"
        for role, lines in {
            "actor": (
                "attn_implementation=auto",
                "logits=auto",
                "gradient_checkpointing=auto",
                "offload.optimizer=step",
            ),
            "ref": ("attn_implementation=auto", "logits=auto"),
            "critic": ("attn_implementation=auto", "gradient_checkpointing=auto", "offload.optimizer=step"),
        }.items()
        for line in lines
    ],
    "capped": [  # long rows, all in one micro-batch of the update alone: nothing before it comes near the cap
        "data.max_response_length=512",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
    ],
}
"""`spread`: the layers of actor and critic over both GPUs. `plain`: verl's own settings on one GPU (stock verl itself loads no critic
without flash-attn). `measures`: the same with memory measures for each role. `capped`: the actor's second rank may use so little of its
card that its update runs out of memory. `wrong`: a device that is not there."""
ON_ONE_GPU = ("plain", "measures")
MUST_FAIL = ("capped", "wrong")
CAP = """import os

import torch

if os.environ.get("RANK") == "1" and torch.cuda.is_available():
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction({gib} * 2**30 / total)
"""
"""Imported by each worker that loads a model (verl's `model.external_lib`)."""
AT_START = """import json
import os
from pathlib import Path

names = {names}
Path({folder!r}, f"{{os.getpid()}}.json").write_text(json.dumps([os.environ.get(name) for name in names]))
"""
"""Each Python process of the job writes the communication settings that it was started with: a process that sets its title
overwrites what `/proc` says of its environment."""
PROCESSES = ("WorkerDict", "vLLMHttpServer", "EngineCore", "VLLM::Worker")
"""Kinds of processes that communicate, by what is in their titles."""
COMPARED = ("critic/score/mean", "critic/vf_loss", "critic/grad_norm", "actor/entropy", "actor/grad_norm")
"""Metrics of the first step, which layouts share within what bf16 rounds and the samples that differ for it."""
TOLERANCE = 0.02
"""Relative, of `COMPARED` on the same samples: some roundings of bf16 (2^-8), as micro-batches are put together otherwise."""
PHASES = ("gen", "old_log_prob", "ref", "values", "update_critic", "update_actor", "update_weights")


def overrides(layout: str, files: assets.Assets, gpus: int, args: argparse.Namespace) -> list[str]:
    """verl's overrides for one layout."""
    samples = max(1, min(4, args.batch // gpus))
    lines = [
        "trainer.plugin=sharding",
        "trainer.nnodes=1",
        f"trainer.n_gpus_per_node={gpus}",
        f"trainer.total_training_steps={args.steps}",
        "trainer.logger=[console,file]",
        "trainer.val_before_train=False",
        "trainer.resume_mode=disable",
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=True",
        f"data.train_files={files.train_files}",
        f"data.val_files={files.val_files}",
        "data.seed=0",
        f"data.train_batch_size={args.batch}",
        "data.max_prompt_length=64",
        f"data.max_response_length={args.response}",
        "data.dataloader_num_workers=0",
        f"actor_rollout_ref.model.path={files.model}",
        f"critic.model.path={files.critic}",
        "actor_rollout_ref.actor.strategy=fsdp2",
        "critic.strategy=fsdp2",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={args.batch}",
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={samples}",
        "critic.use_dynamic_bsz=True",  # as the v1 trainer has it, whatever stands here
        "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
        "actor_rollout_ref.ref.fsdp_config.use_torch_compile=False",
        f"actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu={samples}",
        f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={samples}",
        "actor_rollout_ref.rollout.calculate_log_probs=True",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        f"actor_rollout_ref.rollout.gpu_memory_utilization={args.gpu_memory_utilization}",
        "actor_rollout_ref.rollout.enforce_eager=True",
        "actor_rollout_ref.rollout.agent.num_workers=1",
        # a seed for each sample, so that layouts can be compared: samples differ where bf16 rounds to another token
        "++actor_rollout_ref.rollout.agent.agent_loop_manager_class="
        "verl_ext_sharding.rollout.agent_loop.SeededAgentLoopManager",
        "reward.num_workers=1",
        "+ray_kwargs.ray_init.include_dashboard=False",  # its start can take a minute, and nothing here reads it
        f"reward.custom_reward_function.path={files.reward}",
        f"actor_rollout_ref.rollout.name={'hf' if layout == 'hf' or not util.find_spec('vllm') else 'vllm'}",
    ]
    if util.find_spec("flash_attn") is None and layout != "measures":  # which asks for an attention of its own
        for model in ("actor_rollout_ref.model", "critic.model"):
            lines += [f"+{model}.override_config.attn_implementation=sdpa", f"{model}.use_remove_padding=False"]
    if layout == "capped":
        lines.append("actor_rollout_ref.model.external_lib=capped_rank")
    lines += EXTRA.get(layout, [])
    devices = {"actor": [0, gpus]} if layout == "wrong" else LAYOUTS[layout]
    lines += [f"sharding.roles.{role}.devices={places}".replace(" ", "") for role, places in devices.items()]
    return lines + args.overrides


class Run:
    """One job in a process of its own."""

    def __init__(self, layout: str, folder: Path, lines: list[str], gpu: str | None, args: argparse.Namespace) -> None:
        self.layout, self.log = layout, folder / "output.log"
        self.settings: dict[str, set[tuple[str | None, ...]]] = {}
        self.environments = folder / "environments"
        self.environments.mkdir(exist_ok=True)
        (folder / "sitecustomize.py").write_text(AT_START.format(names=hygiene.NAMES, folder=str(self.environments)))
        self.metrics = folder / "metrics.jsonl"
        (folder / "capped_rank.py").write_text(CAP.format(gib=args.cap_gib))
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])),
            "VERL_SHARDING_EVENTS": "1",
            "RAY_DEDUP_LOGS": "0",
            "VERL_FILE_LOGGER_PATH": str(self.metrics),
            "HF_HUB_OFFLINE": "1",
            "NCCL_DEBUG": "INFO",  # says over what each pair of ranks is connected
            "NCCL_DEBUG_SUBSYS": "INIT",
            "RAY_ADDRESS": "local",
        }
        if args.same_samples:
            env["VLLM_BATCH_INVARIANT"] = "1"
        if gpu is not None:
            env["CUDA_VISIBLE_DEVICES"] = gpu
        command = [sys.executable, "-m", "verl.trainer.main_ppo", *lines]
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            command, stdout=self.log.open("w"), stderr=subprocess.STDOUT, env=env, cwd=folder
        )

    def wait(self, timeout_s: float) -> None:
        """Waits, and ends the job when it takes too long."""
        while self.process.poll() is None and time.monotonic() - self.started < timeout_s:
            self._read_environments()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.wall_s = time.monotonic() - self.started

    def _read_environments(self) -> None:
        """The communication settings of each kind of process of the job."""
        with suppress(psutil.Error, OSError):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                with suppress(psutil.Error, OSError):
                    title = process.cmdline()[0] if process.cmdline() else ""
                    kind = next((kind for kind in PROCESSES if kind in title), None)
                    if kind is not None:
                        values = json.loads((self.environments / f"{process.pid}.json").read_text())
                        self.settings.setdefault(kind, set()).add(tuple(values))

    def communication(self) -> str:
        """Kind of process: value of each setting; "|" between processes that differ."""
        kinds = (
            f"{kind}:{'|'.join(','.join(value or 'unset' for value in values) for values in found)}"
            for kind, found in sorted(self.settings.items())
        )
        return " ".join(kinds) or "n/a"

    @staticmethod
    def error(text: str) -> str:
        """The last line that names an error of memory or of ours."""
        lines = [line for line in text.splitlines() if "OutOfMemoryError" in line or "PlacementError" in line]
        return lines[-1][-200:] if lines else "none"

    def steps(self) -> list[dict[str, float]]:
        """Metrics of each step."""
        lines = self.metrics.read_text().splitlines() if self.metrics.exists() else []
        return [json.loads(line)["data"] for line in lines]

    def row(self) -> dict[str, str]:
        """What the table says of this job."""
        text = self.log.read_text(errors="replace")
        found = [event for line in text.splitlines() if (event := events.parse(line))]
        rows = [row for event in found if event["event"] == "placement" for row in event["rows"]]
        roles = {role: [r["accelerator"] for r in rows if r["role"] == role] for role in {r["role"] for r in rows}}
        steps = self.steps()
        first, last = (steps[0], steps[-1]) if steps else ({}, {})
        peak = {name.split("/")[0]: value for name, value in last.items() if name.endswith("max_memory_allocated_gb")}
        return {
            "layout": self.layout,
            "exit": str(self.process.returncode),
            "devices read back": " ".join(f"{role}:{','.join(ids)}" for role, ids in sorted(roles.items())),
            "communication": self.communication(),
            "NCCL": " ".join(sorted(set(re.findall(r"Channel .* via (\S+)", text)))) or "n/a",
            "error": self.error(text),
            "steps": str(len(steps)),
            "step s, first and last": " ".join(f"{s['timing_s/step']:.1f}" for s in (first, last) if s) or "n/a",
            "phases s": " ".join(f"{p}:{last[f'timing_s/{p}']:.1f}" for p in PHASES if f"timing_s/{p}" in last)
            or "n/a",
            "peak GiB by role": " ".join(f"{role}:{gib:.1f}" for role, gib in peak.items()) or "n/a",
            "prob diff max": f"{last.get('training/rollout_probs_diff_max', float('nan')):.1e}",
            "first step": " ".join(f"{name}:{value:.4g}" for name, value in compared(first).items()) or "n/a",
            "wall s": f"{self.wall_s:.0f}",
        }


def compared(step: dict[str, float]) -> dict[str, float]:
    """Metrics of a step by which layouts are compared."""
    return {name: step[name] for name in COMPARED if name in step}


class PeakMemory(threading.Thread):
    """Peak used memory of each GPU by NVML, sampled."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        import pynvml

        self._nvml = pynvml
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        self._handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        self.peak_gib = [0.0] * count
        self._stop_sampling = threading.Event()

    def run(self) -> None:
        while not self._stop_sampling.wait(0.2):
            for index, handle in enumerate(self._handles):
                used = self._nvml.nvmlDeviceGetMemoryInfo(handle).used / 2**30
                self.peak_gib[index] = max(self.peak_gib[index], used)

    def stop(self) -> list[float]:
        """Ends sampling and returns GiB per GPU."""
        self._stop_sampling.set()
        self.join()
        return self.peak_gib


def main() -> int:
    """Runs the layouts and prints the table; exit code 1 when one failed."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", help="comma-separated, of " + ", ".join(LAYOUTS))
    parser.add_argument("--model", choices=SHAPES, default="0.5B")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--response", type=int, default=128)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.2)
    parser.add_argument("--timeout-s", type=float, default=400)
    parser.add_argument(
        "--cap-gib",
        type=float,
        default=4.5,
        help="memory of the actor's second rank in `capped`; weights, gradients and states of half a 0.5B are 3.7 GiB",
    )
    parser.add_argument("--same-samples", action="store_true", help="compare the first steps of layouts (see above)")
    parser.add_argument("--parallel", action="store_true")
    parser.add_argument("--pin", action="store_true", help="each job on a GPU of its own, all at once")
    parser.add_argument("--keep", type=Path, help="folder for the logs")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    gpus = torch.cuda.device_count()
    fits = [
        name
        for name, roles in LAYOUTS.items()
        if name not in MUST_FAIL and max([device for places in roles.values() for device in places], default=0) < gpus
    ]
    layouts = args.layouts.split(",") if args.layouts else fits
    files = assets.build(assets.TinyModel(vocab_size=151936, **SHAPES[args.model]))
    root = args.keep or Path(tempfile.mkdtemp())
    at_once = args.parallel or args.pin
    rows = []
    runs = []
    for index, layout in enumerate(layouts):
        folder = root / layout
        folder.mkdir(parents=True, exist_ok=True)
        pinned = _visible(gpus)[index % gpus] if args.pin else None
        runs.append(_start(layout, folder, files, 1 if layout in ON_ONE_GPU else gpus, pinned, args))
        if not at_once:
            rows.append(_finish(runs[-1], args.timeout_s))
    rows += [_finish(run, args.timeout_s) for run in runs if at_once]
    _print(rows, args, gpus)
    apart = _print_differences({job.layout: compared(steps[0]) for job, _ in runs if (steps := job.steps())})
    failed = any((row["exit"] != "0") != (row["layout"] in MUST_FAIL) for row in rows)
    return int(failed or (args.same_samples and apart > TOLERANCE))


def _visible(gpus: int) -> list[str]:
    """The GPUs that this process may use, as a job of its own is told of them."""
    exported = os.environ.get("CUDA_VISIBLE_DEVICES")
    return exported.split(",") if exported else [str(index) for index in range(gpus)]


def _start(
    layout: str, folder: Path, files: assets.Assets, gpus: int, pinned: str | None, args: argparse.Namespace
) -> tuple:
    memory = PeakMemory()
    memory.start()
    return Run(layout, folder, overrides(layout, files, gpus, args), pinned, args), memory


def _finish(run: tuple, timeout_s: float) -> dict[str, str]:
    job, memory = run
    job.wait(timeout_s)
    row = job.row() | {"peak GiB by GPU (NVML)": " ".join(f"{gib:.1f}" for gib in memory.stop())}
    if (row["exit"] != "0") != (job.layout in MUST_FAIL):
        print("\n".join(job.log.read_text(errors="replace").splitlines()[-40:]))
    return row


def _print(rows: list[dict[str, str]], args: argparse.Namespace, gpus: int) -> None:
    import torch

    from verl_ext_sharding import versions

    names = ("verl", "torch", "vllm", "transformers", "ray")
    print(
        f"\n{gpus} x {torch.cuda.get_device_name()}, model {args.model}, batch {args.batch}, response {args.response}"
    )
    print(", ".join(f"{name} {versions.installed(name)}" for name in names))
    for row in rows:
        print(f"\n{row['layout']}")
        for name, value in row.items():
            if name != "layout":
                print(f"  {name:24} {value}")


def _print_differences(first_steps: dict[str, dict[str, float]]) -> float:
    """Prints how far the first step of each layout is from that of the first layout, and returns the largest difference, relative."""
    (reference, expected), *others = first_steps.items() or [("", {})]
    largest = 0.0
    for layout, found in others:
        apart = {name: abs(found[name] / value - 1) for name, value in expected.items() if value and name in found}
        print(f"\nfirst step of {layout} from {reference}'s: " + " ".join(f"{n}:{a:.2%}" for n, a in apart.items()))
        largest = max([largest, *apart.values()])
    return largest


if __name__ == "__main__":
    sys.exit(main())
