"""Memory and time of verl's own FSDP2 engines with every measure, one process, tables last.

    python benchmarks/engines.py                                   # one CUDA device, 1.5B, 8 x 2048 tokens
    python benchmarks/engines.py --model 7B --rows 4 --dtype bf16 --parts policies
    torchrun --nproc-per-node 2 benchmarks/engines.py --parts policies --no-stock    # sharded, peak of each card
    python benchmarks/engines.py --tiny                            # CPU, seconds: shows that it runs, not what it costs

A random Qwen2 of the given shape with its real vocabulary, PPO's loss, one micro-batch, forward and backward.

policies  actor engine: GiB kept between forward and backward, peak GiB, ms (median); the same for packed batches of ever
          new lengths from the third on, and how often layers were compiled anew meanwhile. `stock` is verl's engine as it
          is without flash-attn: padded sdpa, and log-probs row by row; `stock packed`, where flash-attn is installed, with it.
padding   packed sequences with varlen against padded ones with sdpa, for sequences of mixed lengths.
update    updates (optimizer included) of actor and critic, same model and tokens: at rest, and peak of each card.
layers    one process: the model on one device, over two by layers, and over two with less memory than it needs on one
          (two CUDA devices; compare `torchrun --nproc-per-node 2 ... --parts policies`, whose ranks have `--rows` each).
offloads  updates of the actor (optimizer included) with each combination of offload: at rest, and peak of each card.
ulysses   updates of the actor under torchrun, the same rows whole on each rank, and with their tokens over all ranks.
idle      verl's engine against ours with nothing to do, alternating.

Liger's kernels are among the policies where liger-kernel is installed.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib import util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from verl_ext_sharding import envs, versions
from verl_ext_sharding.config.guards import Guards
from verl_ext_sharding.config.measures import LayerSpread, RoleMeasures
from verl_ext_sharding.config.spec import RunSpec
from verl_ext_sharding.placement.bundles import place
from verl_ext_sharding.placement.job import EngineFacts, JobFacts

GIB = 2**30
SHAPES = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128},
    "0.5B": {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "intermediate_size": 4864},
    "1.5B": {"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "intermediate_size": 8960},
    "7B": {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "intermediate_size": 18944},
}
NEEDED = ("trainer.plugin", "sharding.roles.*.logits", "critic.model.override_config.attn_implementation")
POLICIES: dict[str, Any] = {
    "none": False,
    "full": "full",
    "every 2nd": {"policy": "every_n", "every": 2},
    "selective": "selective",
    **{f"budget {share}": {"budget": share} for share in (0.7, 0.5, 0.2, 0.05, 0.0)},
    "auto": True,
}
OFFLOADS: dict[str, dict[str, Any]] = {
    "none": {},
    "optimizer": {"optimizer_offload": True},
    "optimizer: step": {"optimizer_per_step": True},
    "params": {"param_offload": True},
    "params, optimizer": {"param_offload": True, "optimizer_offload": True},
    "activations": {"offload_activations": True},
    "all": {"param_offload": True, "optimizer_offload": True, "offload_activations": True},
}
"""`*_offload`: verl's own switches of its engine; the others are measures of ours."""


def spec_text(role: str, measures: RoleMeasures, guards: Guards | None = None) -> str:
    """The spec of a run that asks for one role's measures."""
    facts = JobFacts(num_nodes=1, devices_per_node=1, engines={"actor": EngineFacts(strategy="fsdp2")})
    spec = RunSpec(
        placement=place({}, facts), bundle_cpus=3, measures={role: measures}, needed=NEEDED, guards=guards or Guards()
    )
    return spec.to_json()


class Bench:
    """Engines of one model on one device."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = "cpu" if args.tiny else "cuda"
        self.folder = self._write_model()

    def _write_model(self) -> Path:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

        from verl_ext_sharding.demo import assets

        vocab = 320 if self.args.tiny else 151936
        tied = self.args.model != "7B"
        config = Qwen2Config(
            **SHAPES[self.args.model],
            num_key_value_heads=2 if self.args.model != "7B" else 4,
            vocab_size=vocab,
            max_position_embeddings=32768,
            tie_word_embeddings=tied,
        )
        root = Path("/dev/shm") if Path("/dev/shm").is_dir() and not self.args.tiny else Path(tempfile.gettempdir())
        folder = root / f"bench-{self.args.model}"
        if not (folder / "config.json").exists() and torch.distributed.get_rank() == 0:
            torch.manual_seed(0)
            with torch.device(self.device):
                model = Qwen2ForCausalLM(config).to(torch.bfloat16)
            building = Path(tempfile.mkdtemp(dir=root))
            model.save_pretrained(building)
            tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(assets.build().model)
            tokenizer.save_pretrained(building)
            with suppress(OSError):  # another process was faster
                building.rename(folder)
            shutil.rmtree(building, ignore_errors=True)
        torch.distributed.barrier()
        return folder

    def worker(
        self, role: str, measures: RoleMeasures | None, *, packed: bool = True, liger: bool = False, **engine: Any
    ) -> Any:
        """verl's training worker. Measures of None: verl's own engine class. `engine`: fields of its config."""
        from verl.trainer.config import CheckpointConfig
        from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
        from verl.workers.engine_workers import TrainingWorker

        os.environ[envs.SPEC] = spec_text(role, measures or RoleMeasures())
        attention = "sdpa" if not packed or self.device == "cpu" else "flash_attention_2"
        sizes = dict.fromkeys(("micro_batch_size_per_gpu", "infer_micro_batch_size_per_gpu"), self.args.rows)
        config = TrainingWorkerConfig(
            model_type="value_model" if role == "critic" else "language_model",
            model_config=HFModelConfig(
                path=str(self.folder),
                use_remove_padding=packed,
                enable_gradient_checkpointing=False,
                use_liger=liger,
                override_config={"attn_implementation": attention},
            ),
            engine_config=FSDPEngineConfig(
                strategy=self.args.strategy,
                use_dynamic_bsz=False,
                use_torch_compile=not self.args.tiny,
                model_dtype=self.args.dtype,
                **sizes,
                **engine,
            ),
            optimizer_config=FSDPOptimizerConfig(lr=1e-6, total_training_steps=1000),
            checkpoint_config=CheckpointConfig(),
        )
        with stock_engines() if measures is None else contextmanager(lambda: iter([None]))():
            worker = TrainingWorker(config)
        worker.reset()
        worker.set_loss_fn(self._loss(role))
        return worker

    def _loss(self, role: str) -> Callable[..., Any]:
        from verl.workers.config import ActorConfig
        from verl.workers.utils.losses import ppo_loss, value_loss

        if role == "critic":
            config = SimpleNamespace(cliprange_value=0.5, loss_agg_mode="token-mean", loss_scale_factor=None)
            return functools.partial(value_loss, config=config)
        actor = ActorConfig(strategy=self.args.strategy, rollout_n=1, ppo_micro_batch_size_per_gpu=1)
        return functools.partial(ppo_loss, config=actor)

    def data(self, lengths: list[int], *, packed: bool = True, fused: bool = False, seed: int = 0) -> Any:
        """A micro-batch: a quarter of each sequence is prompt."""
        from verl.utils import tensordict_utils as tu

        random = torch.Generator().manual_seed(seed)
        ids = [torch.randint(0, 256, (length,), generator=random) for length in lengths]
        nested = functools.partial(torch.nested.as_nested_tensor, layout=torch.jagged)
        responses = [one[len(one) // 4 :] for one in ids]
        noise = [torch.randn(len(one), generator=random) for one in responses]
        ones = nested([torch.ones_like(one) for one in responses])
        data = tu.get_tensordict(
            {
                "input_ids": nested(ids),
                "position_ids": nested([torch.arange(len(one)) for one in ids]),
                "prompts": nested([one[: len(one) // 4] for one in ids]),
                "responses": nested(responses),
                "response_mask": ones,
                "loss_mask": ones,
                "old_log_probs": nested([one * 0.1 - 11.9 for one in noise]),
                **{name: nested(noise) for name in ("values", "advantages", "returns")},
            }
        )
        tu.assign_non_tensor(
            data,
            temperature=1.0,
            global_batch_size=None,
            calculate_entropy=False,
            use_remove_padding=packed,
            use_fused_kernels=fused,
            dp_size=1,
            batch_num_tokens=sum(map(len, responses)),
            use_dynamic_bsz=False,
            micro_batch_size_per_gpu=self.args.rows,
        )
        return data

    @property
    def lengths(self) -> list[int]:
        """Full rows."""
        return [self.args.tokens] * self.args.rows

    def mixed(self, seed: int) -> list[int]:
        """Rows of mixed lengths, half full on average."""
        random = torch.Generator().manual_seed(seed)
        return torch.randint(self.args.tokens // 16, self.args.tokens, (self.args.rows,), generator=random).tolist()

    @property
    def flash(self) -> bool:
        """Whether flash-attn can be run here."""
        return self.device == "cuda" and util.find_spec("flash_attn") is not None

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def allocated(self, peak: bool = False) -> float:
        """GiB on the device."""
        if self.device == "cpu":
            return float("nan")
        return (torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()) / GIB

    def step(self, worker: Any, lengths: list[int], packed: bool, seed: int = 0) -> tuple[float, float, float]:
        """Forward and backward of one micro-batch: GiB kept in between, peak GiB above what was there, seconds."""
        engine = worker.engine
        fused = bool(engine.engine_config.use_fused_kernels)
        data = self.data(lengths, packed=packed, fused=fused, seed=seed)
        with engine.train_mode(disable_auto_offload=True):
            self.synchronize()
            if self.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            before, start = self.allocated(), time.perf_counter()
            loss, _ = engine.forward_step(data, loss_function=worker.loss_fn, forward_only=False)
            kept = self.allocated() - before
            loss.backward()
            self.synchronize()
            return kept, self.allocated(peak=True) - before, time.perf_counter() - start

    # Parts

    def policies(self) -> None:
        rows = []
        for packed in (False, True) if self.flash else (False,):
            for name in ("none", "full") if self.args.stock else ():
                worker = self.worker("actor", None, packed=packed)
                if name == "full":
                    worker.engine.module.gradient_checkpointing_enable({"use_reentrant": False})
                rows.append(self._policy_row(f"stock{' packed' * packed}, {name}", worker, packed=packed, steps=2))
                del worker
                self.free()
        worker = self.worker("actor", RoleMeasures(attention="auto", logits="auto"))
        for name, asked in POLICIES.items():
            rows.append(self._with_policy(name, worker, asked))
        rows.append(self._with_policy("full + offload", worker, "full", offload=True))
        rows.append(self._with_policy("budget 0.2 + offload", worker, {"budget": 0.2}, offload=True))
        if util.find_spec("liger_kernel") is not None:
            del worker
            self.free()
            worker = self.worker("actor", RoleMeasures(attention="auto", logits="auto"), liger=True)
            rows += [self._with_policy(f"Liger, {name}", worker, POLICIES[name]) for name in ("none", "full", "auto")]
        columns = ("policy", "kept GiB", "peak GiB", "ms", "packed ms", "recompiles")
        self.table(f"actor engine, {self.args.rows} x {self.args.tokens} tokens", columns, rows)
        del worker
        self.free()

    def _with_policy(self, name: str, worker: Any, asked: Any, *, offload: bool = False) -> list[str]:
        from verl_ext_sharding.training import checkpointing
        from verl_ext_sharding.training.offload import ActivationOffload
        from verl_ext_sharding.training.policy_config import parse_policy

        module = worker.engine.module
        checkpointing.remove(module)
        ActivationOffload().remove(module)
        torch._dynamo.reset()
        policy = parse_policy(asked)
        assert policy is not None
        policy.apply(module, device_type=self.device)
        if offload:
            ActivationOffload().apply(module, device_type=self.device)
        return self._policy_row(name, worker, packed=True, steps=self.args.steps)

    def _policy_row(self, name: str, worker: Any, *, packed: bool, steps: int) -> list[str]:
        from verl_ext_sharding.training import checkpointing

        try:
            self.step(worker, self.lengths, packed)
            runs = [self.step(worker, self.lengths, packed) for _ in range(steps)]
        except torch.OutOfMemoryError:
            self.free()
            return [name, "out of memory", *["n/a"] * 4]
        kept, peak, seconds = (statistics.median(run[index] for run in runs) for index in range(3))
        peaks: list[float] = [0.0] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(peaks, peak)
        row = [name, f"{kept:.2f}", " / ".join(f"{one:.2f}" for one in peaks), f"{seconds * 1e3:.0f}"]
        if not packed:
            return [*row, "n/a", "n/a"]
        new = [self.step(worker, self.mixed(seed), True, seed)[2] for seed in range(2)]
        before = checkpointing.recompiles(worker.engine.module)
        new = [self.step(worker, self.mixed(seed), True, seed)[2] for seed in range(2, 2 + steps)]
        again = checkpointing.recompiles(worker.engine.module) - before
        return [*row, f"{statistics.median(new) * 1e3:.0f}", str(again)]

    def padding(self) -> None:
        rows = []
        cases = [("packed, varlen", "auto", True), ("padded, sdpa", "sdpa", False)]
        for name, attention, packed in cases:
            worker = self.worker("actor", RoleMeasures(attention=attention, logits="auto"), packed=packed)
            for seed in range(2):
                self.step(worker, self.mixed(seed), packed)
            runs = [self.step(worker, self.mixed(seed), packed, seed) for seed in range(2, 2 + self.args.steps)]
            kept, peak, seconds = (statistics.median(run[index] for run in runs) for index in range(3))
            rows.append([name, f"{kept:.2f}", f"{peak:.2f}", f"{seconds * 1e3:.0f}"])
            del worker
            self.free()
        self.table("sequences of mixed lengths", ("batch", "kept GiB", "peak GiB", "ms"), rows)

    def layers(self) -> None:
        """Time and peak of each card, layers over two against one; then both capped below what one needs."""
        rows = []
        two = LayerSpread(device_map="balanced", devices=(0, 1))
        one = LayerSpread(device_map={"": 0}, devices=(0, 1))
        measures = RoleMeasures(attention="auto", logits="auto", checkpointing=True)
        need = 0.0
        for name, spread in (("one card", one), ("two cards", two), ("one, capped", one), ("two, capped", two)):
            total = torch.cuda.get_device_properties(0).total_memory / GIB
            share = 0.75 * need / total if "capped" in name else 1.0
            for card in range(2):
                torch.cuda.set_per_process_memory_fraction(share, card)
            rows.append([name, *self._updates(replace(measures, layers=spread))])
            need = need or torch.cuda.max_memory_allocated(0) / GIB
            self.free()
            print(name, "left", torch.cuda.memory_allocated(0) / GIB, torch.cuda.memory_allocated(1) / GIB)
        self.table("actor, updates by layers over cards", ("layout", "ms", "peak GiB by card"), rows)

    def _updates(self, measures: RoleMeasures) -> tuple[str, str]:
        """Median ms of an update, optimizer included, and each card's peak from loading on."""
        for card in range(2):
            torch.cuda.reset_peak_memory_stats(card)
        try:
            worker = self.worker("actor", measures)
            self._update_ms(worker, 2)
            took = f"{self._update_ms(worker, self.args.steps):.0f}"
        except torch.OutOfMemoryError:
            took = "out of memory"
        return took, " / ".join(f"{torch.cuda.max_memory_allocated(card) / GIB:.2f}" for card in range(2))

    def update(self) -> None:
        rows = []
        for role in ("actor", "critic"):
            logits = "auto" if role == "actor" else None
            worker = self.worker(role, RoleMeasures(attention="auto", logits=logits, checkpointing=True))
            rows.append([role, *self._trained(worker)])
            del worker
            self.free()
        self.table("one update, optimizer included", ("role", "ms", "at rest GiB", "peak GiB"), rows)

    def offloads(self) -> None:
        rows = []
        for name, asked in OFFLOADS.items():
            engine = {key: value for key, value in asked.items() if key in ("param_offload", "optimizer_offload")}
            ours = {key: value for key, value in asked.items() if key not in engine}
            measures = RoleMeasures(attention="auto", logits="auto", checkpointing=True, **ours)
            worker = self.worker("actor", measures, **engine)
            rows.append([name, *self._trained(worker)])
            del worker
            self.free()
        self.table("actor updates, optimizer included", ("offload", "ms", "at rest GiB", "peak GiB"), rows)

    def ulysses(self) -> None:
        rows = []
        measures = RoleMeasures(attention="auto", logits="auto", checkpointing=True)
        for name, size in (("on each card", 1), ("over all cards", torch.distributed.get_world_size())):
            worker = self.worker("actor", measures, ulysses_sequence_parallel_size=size)
            first = worker.train_batch(self.data(self.lengths))
            norm = "n/a" if first is None else f"{first['metrics']['grad_norm']:.6g}"
            rows.append([name, *self._trained(worker), norm, worker.engine.applied["attention"].partition(" ")[0]])
            del worker
            self.free()
        columns = ("rows", "ms", "at rest GiB", "peak GiB", "gradient norm", "attention")
        self.table(f"actor updates, the same {self.args.rows} x {self.args.tokens} tokens on all ranks", columns, rows)

    def _trained(self, worker: Any) -> tuple[str, str, str]:
        """Updates: median ms, GiB at rest after one and peak GiB, both of each card."""
        self._update_ms(worker, 2)
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        took = self._update_ms(worker, self.args.steps)
        cards: list[tuple[float, float]] = [(0.0, 0.0)] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(cards, (self.allocated(), self.allocated(peak=True)))
        rest, peak = (" / ".join(f"{one:.2f}" for one in found) for found in zip(*cards, strict=True))
        return f"{took:.0f}", rest, peak

    def _update_ms(self, worker: Any, steps: int) -> float:
        """Median of some updates, optimizer included."""
        seconds = []
        for seed in range(steps):
            data = self.data(self.lengths, seed=seed)
            self.synchronize()
            start = time.perf_counter()
            worker.train_batch(data)
            self.synchronize()
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds) * 1e3

    def idle(self) -> None:
        workers = {
            "verl's": self.worker("critic", None, packed=False),
            "ours, nothing to do": self.worker("critic", RoleMeasures(), packed=False),
        }
        seconds: dict[str, list[float]] = {name: [] for name in workers}
        for _ in range(3 + 10 * self.args.steps):
            for name, worker in workers.items():
                seconds[name].append(self.step(worker, self.lengths, False)[2])
        medians = {name: statistics.median(values[3:]) for name, values in seconds.items()}
        first = next(iter(medians.values()))
        rows = [[name, f"{value * 1e3:.1f}", f"{value / first:.4f}"] for name, value in medians.items()]
        self.table("critic engine, pairs of steps", ("engine", "ms", "relative"), rows)
        workers.clear()
        self.free()

    def free(self) -> None:
        torch._dynamo.reset()  # compiled layers hold their weights
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def table(self, title: str, columns: tuple[str, ...], rows: list[list[str]]) -> None:
        if torch.distributed.get_rank() > 0:
            return
        widths = [max(len(str(row[index])) for row in [columns, *rows]) for index in range(len(columns))]
        print(f"\n{self.args.model}, {title}", flush=True)
        for row in [columns, *rows]:
            print("  " + "  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)), flush=True)


@contextmanager
def stock_engines() -> Iterator[None]:
    """verl's own engine classes for this platform while the block runs."""
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

    get = EngineRegistry.get_engine_cls
    stock = {"language_model": FSDPEngineWithLMHead, "value_model": FSDPEngineWithValueHead}
    EngineRegistry.get_engine_cls = staticmethod(lambda model_type, backend: stock[model_type])
    try:
        yield
    finally:
        EngineRegistry.get_engine_cls = get


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="1.5B")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--dtype", default="fp32", help="of the stored weights")
    parser.add_argument("--strategy", choices=("fsdp", "fsdp2"), default="fsdp2")
    parser.add_argument("--parts", default="policies,padding,update,idle")
    parser.add_argument("--no-stock", dest="stock", action="store_false", help="leave out verl's own slow log-probs")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if args.tiny:
        args.model, args.rows, args.tokens, args.steps = "tiny", 2, 64, 1
        os.environ[envs.VERL_PLATFORM] = "cpu"
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "29511")
    os.environ[envs.SPEC] = spec_text("actor", RoleMeasures())  # before `import verl`, as in a worker of a run
    import verl.workers.engine_workers  # noqa: F401  (loads the plugin; verl keeps import errors, and they this frame)

    if not args.tiny:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("gloo" if args.tiny else "cpu:gloo,cuda:nccl")
    bench = Bench(args)
    device = "CPU" if args.tiny else f"{torch.distributed.get_world_size()} x {torch.cuda.get_device_name()}"
    if torch.distributed.get_rank() == 0:
        print(device, ", ".join(f"{name} {versions.installed(name)}" for name in ("verl", "torch", "transformers")))
    for part in args.parts.split(","):
        getattr(bench, part)()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
