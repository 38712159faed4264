"""verl's own training worker and FSDP2 engines on CPU, one configuration after another in one process group.

Run as `python -m tests.verl.engine_runs <folder> [case ...]`, one process for each rank with RANK, WORLD_SIZE, MASTER_ADDR
and MASTER_PORT set; `results` does that, all cases in one process for each rank, since imports take as long as many runs.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

from tests import ranks
from tests.verl.engine_cases import ALL, CASES, COMBINED, Case, Size
from verl_ext_sharding import envs
from verl_ext_sharding.config.measures import LayerSpread, RoleMeasures
from verl_ext_sharding.config.spec import RunSpec
from verl_ext_sharding.demo import assets
from verl_ext_sharding.placement.bundles import place
from verl_ext_sharding.placement.job import EngineFacts, JobFacts

STEPS = 2
MICRO_BATCHES = 2
TEMPERATURE = 0.8
LEARNING_RATE = 1e-3
ADAM = {"eps": 1e-3}
"""Far above the rounding of a gradient, which Adam's own 1e-8 would turn into a step of full size."""
NEEDED = ("trainer.plugin", "sharding.roles.*.logits", "critic.model.override_config.attn_implementation")
FP32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
MODEL = {"enable_gradient_checkpointing": False, "override_config": {"attn_implementation": "sdpa"}}
ENGINE = {"strategy": "fsdp2", "use_dynamic_bsz": False, "use_torch_compile": False, "mixed_precision": FP32}


def results(num_ranks: int, folder: Path) -> dict[str, dict[str, Any]]:
    """`{case: what it did}` as rank 0 saw it.

    Args:
        num_ranks: 1 or 2; not all cases are run on both.
        folder: For logs and results.
    """
    for name in sorted({case.model_name for case in CASES}):
        folder_of(name)
    ranks.run_program("tests.verl.engine_runs", num_ranks, folder, spec_of(CASES[0]).to_json())
    return json.loads((folder / "results.json").read_text())


def spec_of(case: Case) -> RunSpec:
    """The spec of a run that asks for the measures of one case."""
    facts = JobFacts(num_nodes=1, devices_per_node=1, engines={"actor": EngineFacts(strategy="fsdp2")})
    return RunSpec(placement=place({}, facts), bundle_cpus=3, measures={case.role: case.measures}, needed=NEEDED)


def folder_of(model_name: str) -> assets.Assets:
    """Files of a tiny model, written once for each machine."""
    if model_name == "qwen3_5":
        return _delta_net()
    return assets.build(assets.TinyModel(num_layers=4, tied=model_name == "qwen2_tied"))


def _delta_net() -> assets.Assets:
    """Qwen3.5 for text: three gated delta nets and one attention layer."""
    files = assets.build()
    home = assets.cache_root() / "qwen3_5-text-4-layers"
    if not (home / "config.json").exists():
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(files.model)
        shape = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "head_dim": 16}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 2}
        delta = {"linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
        torch.manual_seed(0)
        config = AutoConfig.for_model("qwen3_5_text", **shape, **heads, **delta, eos_token_id=tokenizer.eos_token_id)
        with tempfile.TemporaryDirectory(dir=home.parent) as made:
            for part in (AutoModelForCausalLM.from_config(config, dtype=torch.float32), tokenizer):
                part.save_pretrained(Path(made) / "model")
            with suppress(OSError):  # another test process was first
                (Path(made) / "model").rename(home)
    return dataclasses.replace(files, model=home)


# In the ranks


def batch(seed: int, size: Size) -> Any:
    """One rank's mini-batch as verl's trainer sends it: prompts and responses without padding."""
    import torch
    from verl.utils import tensordict_utils as tu

    random = torch.Generator().manual_seed(seed)

    def lengths(low: int, high: int) -> list[int]:
        return torch.randint(low, high, (MICRO_BATCHES * size.sequences,), generator=random).tolist()

    def tokens(sizes: list[int]) -> list[Any]:
        return [torch.randint(0, 256, (length,), generator=random) for length in sizes]

    def nested(values: list[Any]) -> Any:
        return torch.nested.as_nested_tensor(values, layout=torch.jagged)

    def noise(around: float = 0.0, scale: float = 1.0) -> Any:
        return nested([around + scale * torch.randn(len(one), generator=random) for one in response])

    prompt, response = tokens(lengths(*size.prompt)), tokens(lengths(*size.response))
    whole = [torch.cat(pair) for pair in zip(prompt, response, strict=True)]
    ones = [torch.ones(len(one), dtype=torch.int64) for one in response]
    return tu.get_tensordict(
        {
            "input_ids": nested(whole),
            "position_ids": nested([torch.arange(len(one)) for one in whole]),
            "prompts": nested(prompt),
            "responses": nested(response),
            "response_mask": nested(ones),
            "loss_mask": nested(ones),
            "old_log_probs": noise(-5.77, 0.1),  # about those of an untrained model of this vocabulary
            "values": noise(),
            "advantages": noise(),
            "returns": noise(),
        }
    )


class Run:
    """One case in this rank: verl's worker, and what is read from it."""

    def __init__(self, case: Case, rank: int) -> None:
        import torch
        from verl.workers.engine_workers import TrainingWorker

        os.environ[envs.SPEC] = spec_of(case).to_json()
        torch.manual_seed(0)  # adapters
        self.case = case
        seed = 0 if case.same_data else 1000 * rank
        self.batches = [batch(seed + index, case.size) for index in range(STEPS + 1)]
        self.worker = TrainingWorker(_config(case))
        self.worker.reset()
        self.engine = self.worker.engine
        if case.role != "ref":
            self.worker.set_loss_fn(_loss(case))

    def data(self, index: int, *, first_only: bool = False, **more: Any) -> Any:
        """A batch, or its first micro-batch, with the settings that verl's trainer sends along."""
        from verl.utils import tensordict_utils as tu

        data = self.batches[index].clone()
        if first_only:
            data = tu.chunk_tensordict(data, MICRO_BATCHES)[0]
        settings = {
            "temperature": TEMPERATURE,
            "global_batch_size": None,
            "calculate_entropy": self.case.role != "critic",
        }
        tu.assign_non_tensor(data, **{**settings, **more})
        return data

    def infer_from_logits(self) -> dict[str, Any]:
        """The same for a batch that asks for a sum over all logits, or the error."""
        from verl_ext_sharding.errors import ConfigError

        try:
            return self.infer(calculate_sum_pi_squared=True)
        except ConfigError as error:
            return {"error": error}

    def infer(self, **more: Any) -> dict[str, Any]:
        """Log-probs and entropy, or values, of the first micro-batch, in evaluation mode.

        The last token of a sequence predicts nothing: its log-prob is that of whatever comes next in the batch.
        """
        data = self.data(0, first_only=True, compute_loss=False, **more)
        output = self.worker.infer_batch(data)
        found: dict[str, Any] = {}
        if output is None:  # with Ulysses the first rank of a row answers for it
            return found
        for name in ("log_probs", "entropy", "values", "sum_pi_squared"):
            if name in output:
                found.update({f"{name}.{i}": one[:-1].clone() for i, one in enumerate(output[name].unbind())})
        return found

    def train(self, index: int) -> dict[str, float]:
        """One optimizer step of two micro-batches; verl's metrics."""
        output = self.worker.train_batch(self.data(index))
        metrics = {} if output is None else output["metrics"]
        return {key: _number(value) for key, value in metrics.items() if not key.startswith("perf/")}

    def kept(self) -> dict[str, int]:
        """Bytes that one micro-batch keeps from its forward to its backward pass: on the device, on the host.

        `tokens`: how many tokens the layers see, padding included.
        """
        from verl_ext_sharding.training.saved_bytes import LiveStorages

        configs = self.engine.model_config, self.engine.engine_config
        data = self.data(
            0,
            first_only=True,
            use_remove_padding=configs[0].use_remove_padding,
            use_fused_kernels=configs[1].use_fused_kernels,
            dp_size=1,
            batch_num_tokens=1,
        )
        lengths = data["input_ids"].offsets().diff()
        tokens = int(lengths.sum() if configs[0].use_remove_padding else lengths.max() * len(lengths))
        with self.engine.train_mode():
            with LiveStorages() as made:
                loss, _ = self.engine.forward_step(data, loss_function=self.worker.loss_fn, forward_only=False)
            host_bytes = self.host_bytes()
            device_bytes = made.total_bytes() - host_bytes  # on this platform both are in the same memory
            loss.backward()
        return {
            "device": device_bytes,
            "host": host_bytes,
            "host_afterwards": self.host_bytes(in_use=True),
            "tokens": tokens,
        }

    def host_bytes(self, in_use: bool = False) -> int:
        """Bytes of the host buffers of activation offload."""
        from verl_ext_sharding.training.layers import Slot, installed

        stage = next((stage for _, stage in installed(self.engine.module, Slot.OFFLOAD)), None)
        if stage is None:
            return 0
        return stage.offloader.pool.in_use_bytes if in_use else stage.offloader.pool.total_bytes

    def layers(self) -> dict[str, Any]:
        """How the layers were compiled."""
        from verl_ext_sharding.training import checkpointing

        recompute = checkpointing._application(self.engine.module).recompute
        pieces = [variant.backend.pieces for variant in recompute.compiled]
        return {"failure": recompute.failure, "pieces": max(pieces), "graphs": recompute.graphs}

    def optimizer_bytes(self) -> dict[str, int] | None:
        """Where this rank's optimizer states are between steps; None: where verl leaves them."""
        from verl_ext_sharding.training import optimizer_offload

        optimizer = self.engine.optimizer
        offloader = optimizer_offload._OFFLOADERS.get(optimizer)
        if offloader is None:
            return None
        return {"host": offloader.host_bytes(optimizer), "device": offloader.device_bytes(optimizer)}

    def parameter_bytes(self) -> int:
        """Bytes of this rank's part of the large parameters that are trained."""
        parameters = [p for p in self.engine.module.parameters() if p.requires_grad]
        local = [p.to_local() if hasattr(p, "to_local") else p for p in parameters]
        return sum(p.numel() * p.element_size() for p in local if p.numel() * p.element_size() >= 1024)

    def weights(self) -> dict[str, Any]:
        """Whole parameters by name."""
        state = self.engine.module.state_dict()
        return {
            name: value.full_tensor().clone() if hasattr(value, "full_tensor") else value.clone()
            for name, value in state.items()
        }

    def exported(self) -> dict[str, Any]:
        """The weights that the rollout gets."""
        return {name: value.clone() for name, value in self.engine.get_per_tensor_param()[0]}


@contextmanager
def flash_attn() -> Iterator[None]:
    """A card and flash-attn as far as decisions go; its function for packed sequences is a plain one, in fp32 and on the CPU."""
    import torch
    from transformers import modeling_flash_attention_utils

    from verl_ext_sharding.engines import measured
    from verl_ext_sharding.training import attention, packed_flash, varlen

    kernel = packed_flash.FlashKernel(dtypes=frozenset({torch.float32}), device_type="cpu")
    stand_in = functools.partial(packed_flash.packed_flash_attention, kernel=kernel)
    with ExitStack() as stack:
        for owner, name, value in (
            (
                modeling_flash_attention_utils,
                "_lazy_imports",
                lambda *_, **__: (None, _flash_attn_varlen, None, None, None),
            ),
            (modeling_flash_attention_utils, "_loaded_implementation", None),
            (packed_flash, "packed_flash_attention", stand_in),
            (varlen, "HALF", frozenset({torch.float32})),
            (attention, "flash_attn_importable", lambda: True),
            (measured, "_capability", lambda: (9, 0)),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def _flash_attn_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Any:
    """flash-attn's function, by its names, for tokens of sequences laid end to end; a square, which the compiler can trace."""
    import torch

    assert causal
    place = torch.arange(q.shape[0])
    sequence = torch.bucketize(place, cu_seqlens_q[1:], right=True)
    seen = (sequence[:, None] == sequence[None]) & (place[:, None] >= place[None])
    k, v = (states.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for states in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * softmax_scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)


def _config(case: Case) -> Any:
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig

    files = folder_of(case.model_name)
    sizes = dict.fromkeys(("micro_batch_size_per_gpu", "infer_micro_batch_size_per_gpu"), case.size.sequences)
    path = files.critic if case.role == "critic" else files.model
    return TrainingWorkerConfig(
        model_type="value_model" if case.role == "critic" else "language_model",
        model_config=HFModelConfig(path=str(path), **{**MODEL, **case.model}),
        engine_config=FSDPEngineConfig(**{**ENGINE, **case.engine, **sizes}),
        optimizer_config=FSDPOptimizerConfig(lr=LEARNING_RATE, total_training_steps=10, override_optimizer_config=ADAM),
        checkpoint_config=CheckpointConfig(),
    )


def _loss(case: Case) -> Any:
    from types import SimpleNamespace

    from verl.workers.config import ActorConfig
    from verl.workers.utils.losses import ppo_loss, value_loss

    if case.role == "critic":
        config = SimpleNamespace(cliprange_value=0.5, loss_agg_mode="token-mean", loss_scale_factor=None)
        return functools.partial(value_loss, config=config)
    config = ActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1, entropy_coeff=0.01)
    return functools.partial(ppo_loss, config=config)


def _number(value: Any) -> float:
    """A metric of verl: a number, a `Metric`, or lists of them by rank and micro-batch."""
    if isinstance(value, list):
        numbers = [_number(one) for one in value]
        return sum(numbers) / len(numbers)
    return float(value.aggregate() if hasattr(value, "aggregate") else value)


# Cases


def run_case(case: Case, rank: int, made: dict[str, dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Runs one case.

    Args:
        case: The case.
        rank: This rank.
        made: Tensors of the cases before, to compare with; this one's are added.
        folder: For checkpoints.

    Returns:
        What JSON can hold.
    """
    with ExitStack() as stack:
        messages, loops = stack.enter_context(_Messages()), stack.enter_context(_RowLoops())
        warned = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        if case.flash_attn:
            stack.enter_context(flash_attn())
        run = Run(case, rank)
        tensors = {"inferred": run.infer()}
        if case.reads_logits:
            tensors["inferred from logits"] = run.infer_from_logits()
        found: dict[str, Any] = {"names": sorted(run.weights()), "applied": run.engine.applied}
        if case.role != "ref":
            if not case.compiled:
                found["kept"] = run.kept()
            found["steps"] = []
            for index in range(STEPS):
                run.worker.to("device")
                found["steps"].append(run.train(index))
                run.worker.to("cpu")
            tensors |= {"weights": run.weights(), "inferred afterwards": run.infer()}
            if case.model.get("lora_rank"):  # the reference of a run with LoRA
                tensors["inferred without adapter"] = run.infer(no_lora_adapter=True)
            tensors["exported"] = run.exported()
            found |= {"exported": sorted(tensors["exported"]), "parameter_bytes": run.parameter_bytes()}
            found["optimizer_bytes"] = run.optimizer_bytes()
            if case.compiled:
                found["layers"] = run.layers()
        theirs = run.worker.model_config
        found["shared"] = {"attention": theirs.hf_config._attn_implementation, "fused": theirs.use_fused_kernels}
        found["row_loops"] = loops.calls
        if case is COMBINED:
            found["resumed"] = _resume(run, rank, tensors["weights"], folder / "checkpoint")
    error = tensors.get("inferred from logits", {}).get("error")
    if error is not None:
        found["error"] = str(error)
        del tensors["inferred from logits"]
    found["messages"] = messages.texts
    found["warnings"] = sorted({str(warning.message) for warning in warned})
    if case.like is not None and rank == 0:
        found["difference"] = _differences(tensors, made[case.like])
    made[case.name] = tensors
    return found


def _resume(run: Run, rank: int, weights: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Saves, makes one more step, and makes that step again from the checkpoint: with the measures, and without any."""
    run.worker.save_checkpoint(str(folder), global_step=STEPS)
    reference = run.train(STEPS) | {"weights": run.weights()}
    bare = dataclasses.replace(COMBINED, measures=RoleMeasures(), model={"use_remove_padding": False})
    found: dict[str, Any] = {"config": (folder / "huggingface" / "config.json").read_text()}
    resumed = {"measured": COMBINED, "bare": bare}
    if run.worker.world_size == 1:
        layers = LayerSpread(devices=(0, 1, 2))
        resumed["spread"] = dataclasses.replace(COMBINED, measures=dataclasses.replace(ALL, layers=layers))
    for name, case in resumed.items():
        again = Run(case, rank)
        again.worker.load_checkpoint(str(folder))
        loaded = again.weights()
        step = again.train(STEPS)
        found[name] = {
            "loaded": _largest(loaded, weights),
            "loss": abs(step["loss"] - reference["loss"]),
            "weights": _largest(again.weights(), reference["weights"]),
            "optimizer_bytes": again.optimizer_bytes(),
        }
    return found


def _differences(found: dict[str, Any], reference: dict[str, Any]) -> dict[str, float]:
    return {kind: _largest(found[kind], tensors) for kind, tensors in reference.items() if kind in found}


def _largest(found: dict[str, Any], reference: dict[str, Any]) -> float:
    """The largest difference of tensors by name, relative to the largest value of each; 0.0 is bit for bit.

    A step of the optimizer is the least that counts as a value: some biases have no gradient but rounding.
    """
    assert found.keys() == reference.keys()
    return max(
        float((found[name] - value).abs().max()) / max(float(value.abs().max()), LEARNING_RATE)
        for name, value in reference.items()
    )


class _Messages(logging.Handler):
    """Collects what this package logs inside the block."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def __enter__(self) -> _Messages:
        logging.getLogger("verl_ext_sharding").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("verl_ext_sharding").removeHandler(self)


class _RowLoops:
    """Counts the calls of verl's log-probs that walk logits row by row, inside the block."""

    def __enter__(self) -> _RowLoops:
        import verl.utils.torch_functional as functional

        self.calls = 0
        self.module, self.stock = functional, functional.logprobs_from_logits_v2
        functional.logprobs_from_logits_v2 = self
        return self

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        return self.stock(*args)

    def __exit__(self, *_: object) -> None:
        self.module.logprobs_from_logits_v2 = self.stock


def main(folder: Path, names: list[str]) -> None:
    """Runs the cases, all or those named, in this rank."""
    import torch
    import verl  # noqa: F401  (loads the plugin)

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    cases = [case for case in CASES if case.runs_on(num_ranks) and (not names or case.name in names)]
    made: dict[str, dict[str, Any]] = {}
    found = {case.name: run_case(case, rank, made, folder) for case in cases}
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(found, indent=1))
    ranks.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
