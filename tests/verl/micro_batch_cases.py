"""Asks the installed verl whether it takes the micro-batches of many requests; a program of its own, prints JSON.

Each case is a job, what the user wrote of its micro-batches, and a request for some roles. The answer is our refusal if there
is one, and verl's, without our check.
"""

import copy
import itertools
import json
import sys

from omegaconf import DictConfig, OmegaConf, open_dict
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config

from verl_ext_sharding.cli.plan import compose
from verl_ext_sharding.config.changes import apply_changes
from verl_ext_sharding.config.facts import job_facts
from verl_ext_sharding.config.micro_batches import check_micro_batches
from verl_ext_sharding.config.schema import ShardingConfig
from verl_ext_sharding.config.translate import translate, values_of
from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.placement.bundles import place
from verl_ext_sharding.placement.job import TRAINED_ROLES

ACTOR, REF, ROLLOUT = (f"actor_rollout_ref.{name}" for name in ("actor", "ref", "rollout"))
JOBS = {
    "ppo with a reference": ["algorithm.use_kl_in_reward=True"],
    "grpo": ["algorithm.adv_estimator=grpo"],
    "grpo with lora": [
        "algorithm.adv_estimator=grpo",
        f"{ACTOR}.use_kl_loss=True",
        "actor_rollout_ref.model.lora_rank=8",
        f"{ROLLOUT}.name=sglang",
    ],
}
FIXED = {
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": 4,
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 4,
    f"{REF}.log_prob_micro_batch_size_per_gpu": 4,
    "critic.ppo_micro_batch_size_per_gpu": 4,
}
OLD = {key.removesuffix("_per_gpu"): 8 for key in FIXED}
DYNAMIC = {f"{ACTOR}.use_dynamic_bsz": True}
WRITTEN = {
    "nothing": {},
    "sizes of all": FIXED,
    "sizes of the actor": dict(list(FIXED.items())[:2]),
    "token budgets": DYNAMIC,
    "token budgets, and sizes of all": DYNAMIC | FIXED,
    "token budgets of the actor alone": DYNAMIC
    | {f"{REF}.log_prob_use_dynamic_bsz": False, "critic.use_dynamic_bsz": False},
    "token budgets of reference and critic": FIXED
    | {f"{REF}.log_prob_use_dynamic_bsz": True, "critic.use_dynamic_bsz": True}
    | {f"{REF}.log_prob_micro_batch_size_per_gpu": None, "critic.ppo_micro_batch_size_per_gpu": None},
    "deprecated sizes": OLD,
    "deprecated sizes under token budgets": OLD | DYNAMIC,
}
ASKED = ({}, {"micro_batch_size": 2}, {"max_tokens": 32768})
BATCH = ["trainer.n_gpus_per_node=8", "data.train_batch_size=64", f"{ACTOR}.ppo_mini_batch_size=32"]


def requests(roles):
    """Every combination of what can be asked for one or two of these roles."""
    for asked in itertools.product(ASKED, repeat=len(roles)):
        if 1 <= sum(map(bool, asked)) <= 2:
            yield {role: settings for role, settings in zip(roles, asked, strict=True) if settings}


def without_ballast(config):
    """Takes out what no check of micro-batches reads; resolving it takes most of the time."""
    OmegaConf.set_struct(config, False)
    for block in (
        config.actor_rollout_ref.actor,
        config.actor_rollout_ref.ref,
        config.actor_rollout_ref.rollout,
        config.critic,
    ):
        block.pop("profiler")
    for name in ("reward", "distillation", "transfer_queue", "skip", "global_profiler"):
        config.pop(name, None)
    config.trainer.plugin = None  # verl's own check, and not the one that asks the driver
    config.critic.model = {}
    return config


def outcome(config, facts, asked, current):
    """Our refusal, verl's refusal, and what we set. The config is what `driver.prepare` makes of it, as far as this goes."""
    request = ShardingConfig.parse({"roles": asked})
    changes = translate(request, facts, place(dict.fromkeys(TRAINED_ROLES), facts), current)
    applied = [change.key for change in apply_changes(config, changes, {})]
    try:
        check_micro_batches(request, facts, values_of(config))
        ours = None
    except ConfigError as error:
        ours = str(error)
    return {"ours": ours, "verl": refused_by_verl(config, facts), "set": applied, "asked": asked}


def refused_by_verl(config, facts):
    """What ends the job, of the checks that read micro-batches and need no model."""
    try:
        validate_config(config, need_reference_policy(config), need_critic(config))
        _as_workers_do(config.actor_rollout_ref, facts)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _as_workers_do(config: DictConfig, facts):
    """The asserts and the reference's config of `ActorRolloutRefWorker.init_model` (workers/engine_workers.py)."""
    if "ref" in facts.engines and not facts.ref_in_actor:
        ref = copy.deepcopy(config.ref)
        with open_dict(ref):
            ref.ppo_mini_batch_size = config.actor.ppo_mini_batch_size
            ref.ppo_micro_batch_size = ref.pop("log_prob_micro_batch_size")
            ref.ppo_micro_batch_size_per_gpu = ref.pop("log_prob_micro_batch_size_per_gpu")
            ref.use_dynamic_bsz = ref.pop("log_prob_use_dynamic_bsz")
            ref.ppo_max_token_len_per_gpu = ref.pop("log_prob_max_token_len_per_gpu")
        omega_conf_to_dataclass(ref)
        assert ref.use_dynamic_bsz or ref.ppo_micro_batch_size_per_gpu is not None  # a step divides by it
    if not config.actor.use_dynamic_bsz:
        assert config.rollout.log_prob_micro_batch_size_per_gpu is not None
        assert config.actor.ppo_micro_batch_size_per_gpu is not None


def main():
    answers = {}
    for (job, overrides), (name, written) in itertools.product(JOBS.items(), WRITTEN.items()):
        lines = [f"{key}={'null' if value is None else value}" for key, value in written.items()]
        config = compose([*BATCH, *overrides, *lines])
        facts = job_facts(config)
        roles = [role for role in facts.engines if role != "ref" or not facts.ref_in_actor]
        current = values_of(without_ballast(config))
        answers[f"{job}: {name}"] = [outcome(copy.deepcopy(config), facts, asked, current) for asked in requests(roles)]
    print("answers", json.dumps(answers))


if __name__ == "__main__":
    sys.exit(main())
