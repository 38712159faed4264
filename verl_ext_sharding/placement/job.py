"""What placement must know of a job, as plain numbers. `config.facts` reads them from verl's config."""

from __future__ import annotations

from dataclasses import dataclass, field

TRAINED_ROLES = ("actor", "ref", "critic")
SERVED_ROLES = ("reward", "teacher")

MODEL_PARALLEL = {
    "megatron": ("context_parallel_size", "tensor_model_parallel_size", "pipeline_model_parallel_size"),
    "torchtitan": ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"),
    "veomni": ("ulysses_parallel_size",),
}
"""Keys below the block of a strategy whose product is the ranks that one sample takes; FSDP has Ulysses' key alone.

By the first the engine multiplies a token budget (`sp_size` in verl/workers/engine/*/transformer_impl.py).
"""


EXPERT_PARALLEL = {
    "megatron": ("expert_model_parallel_size", "pipeline_model_parallel_size"),
    "torchtitan": ("expert_parallel_size", "pipeline_parallel_size"),
    "veomni": ("expert_parallel_size",),
}
"""Keys whose product, with Megatron's tensor parallelism of experts, is the ranks that one copy of the experts takes.

Megatron: `initialize_model_parallel` (megatron/core/parallel_state.py); its experts have the tensor parallelism of the rest
unless `expert_tensor_parallel_size` says otherwise.
"""


@dataclass(kw_only=True, frozen=True)
class MicroBatch:
    """A fixed micro-batch of one computation.

    Args:
        key: verl's key.
        samples: Samples of one rank that go through at once.
        of_step: Whether it divides a whole step's samples (log-probs), else a mini-batch's (training).
        override: What to type before the `=` to change it; empty: `key`.
    """

    key: str
    samples: int
    of_step: bool
    override: str = ""


@dataclass(kw_only=True, frozen=True)
class EngineFacts:
    """How one role is trained or evaluated.

    Args:
        strategy: verl's engine name, such as "fsdp2" or "megatron".
        model_parallel_size: Ranks that hold one copy of the sample (tensor x pipeline x context, or Ulysses), 1 or more.
        mini_batch_size: Prompts of one optimizer step, None for a role that doesn't train.
        micro_batches: Fixed micro-batches; none with token budgets (`use_dynamic_bsz`).
        worker_class: Name of verl's worker class.
        dynamic_batches: `use_dynamic_bsz` of the role's block: verl then compares no batch sizes at launch.
        sequence_parallel_size: The part of `model_parallel_size` by which a token budget grows.
        sequence_parallel_keys: verl's keys that set it, all of them to the same number.
        expert_parallel_size: Parts of the experts of a mixture, 1 or more.
        expert_ranks: Ranks that hold one copy of the experts: those parts x their tensor parallelism x pipeline.
    """

    strategy: str
    model_parallel_size: int = 1
    mini_batch_size: int | None = None
    micro_batches: tuple[MicroBatch, ...] = ()
    worker_class: str = "TrainingWorker"
    dynamic_batches: bool = False
    sequence_parallel_size: int = 1
    sequence_parallel_keys: tuple[str, ...] = ()
    expert_parallel_size: int = 1
    expert_ranks: int = 1


@dataclass(kw_only=True, frozen=True)
class ServerFacts:
    """A group of inference servers: rollout, reward model or teacher.

    Args:
        name: Backend, such as "vllm" or "hf".
        ranks_per_replica: Devices of one server (tensor x data x pipeline).
        own_nodes: Devices on each node of a pool that verl reserves outside the trainer's; empty where its size is 0, None
            where there is no such pool.
        tensor_parallel_size: Its tensor-parallel part, None when that is all of it.
        block: verl's block with its parallel sizes; empty: the role's usual one.
        replicas: Ranks of each server in verl's order, where their number is set (several teachers); None: as many servers
            as fit.
        replica_units: `node_unit` of each of them.
        data_parallel_size: Its data-parallel part.
        decoders: Servers that decode of a disaggregated one, and ranks of each; None: it is not disaggregated.
    """

    name: str
    ranks_per_replica: int = 1
    own_nodes: tuple[int, ...] | None = None
    tensor_parallel_size: int | None = None
    block: str = ""
    replicas: tuple[int, ...] | None = None
    replica_units: tuple[int, ...] = ()
    data_parallel_size: int = 1
    decoders: tuple[int, int] | None = None

    @property
    def own_devices(self) -> int:
        """Devices of the pool that verl reserves outside the trainer's, 0 without one."""
        return sum(self.own_nodes or ())

    @property
    def node_unit(self) -> int:
        """Ranks that must lie on one node together, 1 where any may lie anywhere.

        All of a server that is disaggregated (`vLLMPDReplica`, `SGLangPDReplica`) or ours, and those of each data-parallel
        part of vLLM, which asserts it (`launch_server`, workers/rollout/vllm_rollout/vllm_async_server.py).
        """
        if self.decoders is not None or self.name == "hf":
            return self.ranks_per_replica
        if self.name == "vllm" and self.data_parallel_size > 1:
            return self.tensor_parallel_size or 1
        return 1


@dataclass(kw_only=True, frozen=True)
class JobFacts:
    """A job as placement sees it.

    Args:
        num_nodes: `trainer.nnodes`.
        devices_per_node: `trainer.n_gpus_per_node`.
        mode: `trainer.v1.trainer_mode`; recipes may register others.
        engines: Roles that train or evaluate in this job: actor always, ref and critic when the algorithm needs them.
        rollout: The generation servers.
        reward: Reward-model servers, or None.
        teacher: Teacher servers, or None.
        ref_in_actor: LoRA: the reference is the actor without its adapter, and needs no device of its own.
        hybrid_rollout: The actor's devices also serve rollout (false only in separate_async with hybrid_engine=False).
        train_batch_size: Prompts of one step.
        rollout_n: Responses of one prompt.
        parameter_sync_step: Updates of one step; each takes `train_batch_size / parameter_sync_step` prompts.
        critic_warmup: `trainer.critic_warmup`: the actor is not trained before this step.
        actor_log_probs: The actor's engine computes log-probs of what was generated (not with rollout correction in
            bypass mode, unless the actor is the reference too).
        transfer_queue_units: Processes of TransferQueue that each hold a CPU, the controller included.
        reward_workers: `reward.num_workers`, where each starts as many processes that score and hold a CPU; else 0.
    """

    num_nodes: int
    devices_per_node: int
    mode: str = "sync"
    engines: dict[str, EngineFacts] = field(default_factory=dict)
    rollout: ServerFacts = field(default_factory=lambda: ServerFacts(name="vllm"))
    reward: ServerFacts | None = None
    teacher: ServerFacts | None = None
    ref_in_actor: bool = False
    hybrid_rollout: bool = True
    train_batch_size: int = 1
    rollout_n: int = 1
    parameter_sync_step: int = 1
    critic_warmup: int = 0
    actor_log_probs: bool = True
    transfer_queue_units: int = 0
    reward_workers: int = 0

    @property
    def reward_cpus(self) -> int:
        """CPUs of the processes that score."""
        return self.reward_workers**2

    @property
    def servers(self) -> dict[str, ServerFacts]:
        """The groups of inference servers that the job has, by role."""
        found = {"rollout": self.rollout, "reward": self.reward, "teacher": self.teacher}
        return {role: server for role, server in found.items() if server is not None}

    @property
    def backends(self) -> dict[str, str]:
        """Backend of each group of inference servers, by verl's key that names it."""
        return {f"{server.block}.name": server.name for server in self.servers.values()}
