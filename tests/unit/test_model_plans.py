"""Attention and log-probs asked of models: refused in the driver, or on the nodes, before anything loads."""

import functools

import pytest

from verl_ext_sharding import driver, model_plans
from verl_ext_sharding.config.changes import parse_overrides
from verl_ext_sharding.demo.assets import build
from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.workers.probe import Packages, packages

pytest.importorskip("torch")

JOB = (
    "trainer.n_gpus_per_node=2",
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "critic.ppo_mini_batch_size=8",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "algorithm.use_kl_in_reward=True",
)
H200, V100 = (9, 0), (7, 0)
BARE = Packages(torch="2.11.0+cu130", flash_attn=False, kernels=False)
WITH_FLASH = Packages(torch="2.11.0+cu130", flash_attn=True, kernels=False)
WITH_KERNELS = Packages(torch="2.11.0+cu130", flash_attn=False, kernels=True)
OLD_TORCH = Packages(torch="2.9.1", flash_attn=False, kernels=False)


@pytest.fixture(scope="module")
def gemma2(tmp_path_factory):
    """A folder with the config of a model that caps its attention scores and its logits."""
    from transformers import AutoConfig

    folder = tmp_path_factory.mktemp("gemma2")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 320, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = AutoConfig.for_model("gemma2", **shape, **heads, architectures=["Gemma2ForCausalLM"])
    config.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def planned(compose):
    """`planned(*settings)`: the plan of the demo's job with settings."""

    @functools.cache
    def made(*settings):
        files = build()
        models = (f"actor_rollout_ref.model.path={files.model}", f"critic.model.path={files.critic}")
        overrides = [*JOB, *models, *settings]
        return driver.prepare(compose(*overrides), parse_overrides(overrides))

    return made


def check(plan, *, cards=(H200, H200), nodes=(BARE,)):
    """The nodes' answers against what the plan's roles compute attention with."""
    names = {str(index): node for index, node in enumerate(nodes)}
    model_plans.check_nodes(plan.attention, plan.placement, dict(enumerate(cards)), names)


# Against the model


def test_an_attention_that_the_model_can_not_run_is_refused_with_one_that_it_can(planned, gemma2):
    asked = (f"actor_rollout_ref.model.path={gemma2}", "sharding.roles.ref.attn_implementation=sdpa")
    with pytest.raises(ConfigError) as caught:
        planned(*asked)
    assert caught.value.subject == "sharding.roles.ref.attn_implementation=sdpa"
    assert "gemma2 caps them" in caught.value.found
    assert caught.value.remedy.endswith(", or sharding.roles.ref.attn_implementation=auto")
    planned(asked[0], "sharding.roles.ref.attn_implementation=auto")


def test_fused_log_probs_of_a_model_that_caps_its_logits_are_refused(planned, gemma2):
    asked = (f"actor_rollout_ref.model.path={gemma2}", "sharding.roles.actor.logits=fused")
    with pytest.raises(ConfigError) as caught:
        planned(*asked)
    assert caught.value.subject == "sharding.roles.actor.logits=fused"
    assert "Gemma2ForCausalLM does more to its logits than its output head" in caught.value.found
    planned(asked[0], "sharding.roles.actor.logits=chunked")


def test_a_model_that_can_do_what_is_asked_passes(planned):
    plan = planned("sharding.roles.actor.logits=fused", "sharding.roles.critic.attn_implementation=varlen")
    assert {use.role: use.requested for use in plan.attention} == {
        "actor": "flash_attention_2",
        "ref": "flash_attention_2",
        "critic": "varlen",
    }


def test_a_model_that_only_workers_reach_is_left_to_them(planned, tmp_path):
    nowhere = f"actor_rollout_ref.model.path={tmp_path}/nowhere"
    planned(nowhere, "sharding.roles.actor.logits=fused", "sharding.roles.actor.attn_implementation=sdpa")


def test_no_model_is_read_for_a_run_that_asks_nothing_of_it_by_name(planned, monkeypatch):
    monkeypatch.setattr(model_plans, "hf_config_of", lambda *_: pytest.fail("a model was read"))
    monkeypatch.setattr(model_plans, "meta_model_of", lambda *_, **__: pytest.fail("a model was read"))
    planned("sharding.roles.actor.attn_implementation=auto", "sharding.roles.actor.logits=auto")


def test_kernels_of_cuda_are_refused_on_cpus(planned):
    with pytest.raises(ConfigError, match="needs a CUDA device") as caught:
        planned(
            "trainer.device=cpu", "actor_rollout_ref.rollout.name=hf", "sharding.roles.actor.attn_implementation=varlen"
        )
    assert "attn_implementation=sdpa" in caught.value.remedy


ULYSSES = "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2"


def test_ulysses_with_an_attention_that_can_not_exchange_heads_is_refused(planned):
    with pytest.raises(ConfigError, match="the tokens of one rank alone"):
        planned(ULYSSES, "sharding.roles.actor.attn_implementation=eager")
    planned(ULYSSES, "sharding.roles.actor.attn_implementation=varlen")


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_ulysses_with_an_attention_of_verls_key_that_sees_one_slice_is_refused_with_what_to_type(name, planned):
    asked = (ULYSSES, f"+actor_rollout_ref.model.override_config.attn_implementation={name}")
    with pytest.raises(ConfigError, match="trains on slices") as caught:
        planned(*asked)
    planned(*asked, caught.value.remedy.partition(",")[0])


def test_ulysses_with_verls_own_flash_attention_passes(planned):
    planned(ULYSSES)
    planned(ULYSSES, "+actor_rollout_ref.model.override_config.attn_implementation=kernels-community/flash-attn2")


# Against the nodes


def test_a_job_without_flash_attn_is_told_before_it_starts_and_what_to_type(planned):
    plan = planned()
    with pytest.raises(ConfigError) as caught:
        check(plan)
    error = caught.value
    assert error.subject == "attention of actor, ref, critic"
    keys, _, rest = error.remedy.partition(", or ")
    assert rest == "pip install flash-attn"
    check(planned(*keys.split()))


@pytest.mark.parametrize("node", [WITH_FLASH, WITH_KERNELS])
def test_verls_own_attention_passes_where_transformers_finds_it(node, planned):
    check(planned(), nodes=(node,))


def test_an_attention_by_verls_own_key_counts(planned):
    settings = [
        f"+{model}.override_config.attn_implementation=sdpa" for model in ("actor_rollout_ref.model", "critic.model")
    ]
    check(planned(*settings))


def test_cards_that_are_not_known_refuse_nothing(planned):
    check(planned("sharding.roles.actor.attn_implementation=flash_attention_2"), cards=(None, None))


@pytest.mark.parametrize(
    ("card", "node", "why"),
    [
        (V100, WITH_FLASH, "before Ampere's 8.0"),
        (H200, OLD_TORCH, "torch 2.9.1 is older than 2.10"),
    ],
)
def test_varlen_is_refused_where_a_card_or_torch_can_not(card, node, why, planned):
    settings = [f"sharding.roles.{role}.attn_implementation=auto" for role in ("actor", "ref")]
    plan = planned(*settings, "sharding.roles.critic.attn_implementation=varlen", "sharding.roles.critic.devices=[1]")
    check(plan, cards=(V100, H200), nodes=(BARE,))
    with pytest.raises(ConfigError, match=why):
        check(plan, cards=(H200, card), nodes=(node,))


def test_only_the_nodes_of_a_role_count(planned):
    asked = [f"sharding.roles.{role}.attn_implementation=auto" for role in ("actor", "ref")]
    job = ("trainer.n_gpus_per_node=1", "trainer.nnodes=2", "sharding.roles.critic.devices=[1]")
    plan = planned(*job, *asked)
    check(plan, nodes=(BARE, WITH_FLASH))
    with pytest.raises(ConfigError, match="attention of critic"):
        check(plan, nodes=(WITH_FLASH, BARE))
    check(plan, nodes=(BARE, WITH_FLASH, BARE))  # Ray may take either


def test_packages_are_those_of_this_environment():
    import torch

    here = packages()
    assert here.torch.partition("+")[0] == torch.__version__.partition("+")[0]
    assert here.kernels is False or here.kernels is True
