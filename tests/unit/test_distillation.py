"""Teachers and losses of distillation: what verl refuses once the actor is built is refused before, and nothing else."""

import shlex

import pytest
from omegaconf import OmegaConf

from verl_ext_sharding import driver
from verl_ext_sharding.config.changes import parse_overrides

pytest.importorskip("verl")

MODELS, LOSS = "distillation.teacher_models", "distillation.distillation_loss"
ONE, OTHER = f"{MODELS}.teacher_model", f"{MODELS}.code"
JOB = (
    "trainer.n_gpus_per_node=4",
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "distillation.enabled=True",
    "distillation.nnodes=1",
)
SINGLE = (
    "distillation.n_gpus_per_node=1",
    f"{ONE}.model_path=/teacher",
    f"{ONE}.inference.tensor_model_parallel_size=1",
)
SEVERAL = (
    "distillation.n_gpus_per_node=2",
    *(
        f"+{MODELS}.{name}={{key:{name},model_path:/{name},num_replicas:1,"
        "inference:{_target_:verl.workers.config.RolloutConfig,name:vllm,tensor_model_parallel_size:1}}"
        for name in ("math", "code")
    ),
)
TOP_K = (*SINGLE, f"{LOSS}.loss_mode=forward_kl_topk")
MAX_LOGPROBS = f"{ONE}.inference.engine_kwargs.vllm.max_logprobs"


@pytest.fixture
def planned(compose):
    """Plans a job with teachers; the config, with what the plan set."""

    def run(*overrides):
        lines = [*JOB, *overrides]
        config = compose(*lines)
        driver.prepare(config, explicit=parse_overrides(lines))
        return config

    return run


@pytest.fixture
def refused_by_verl(compose):
    """What verl says to a job's teachers where it builds the actor; None: it takes them."""

    def said(*overrides):
        from verl.utils.config import omega_conf_to_dataclass

        config = compose(*JOB, *overrides)
        OmegaConf.resolve(config)
        try:
            omega_conf_to_dataclass(config.distillation)
        except Exception as error:
            return str(error)
        return None

    return said


@pytest.mark.parametrize(
    ("overrides", "subject"),
    [
        ((*SINGLE, f"{ONE}.inference.max_model_len=512"), f"{ONE}.inference.max_model_len"),
        ((*SEVERAL, f"+{OTHER}.inference.max_model_len=1024"), f"{OTHER}.inference.max_model_len"),
        ((*TOP_K, f"+{MAX_LOGPROBS}=8"), MAX_LOGPROBS),
        ((*TOP_K, f"{ONE}.inference.name=trtllm"), f"{ONE}.inference.name"),
        ((*TOP_K, f"{LOSS}.topk=null"), f"{LOSS}.topk"),
        ((*SINGLE, f"{LOSS}.loss_mode=k1"), f"{LOSS}.use_policy_gradient"),
        ((*SINGLE, f"{LOSS}.policy_loss_mode=gspo"), f"{LOSS}.policy_loss_mode"),
        ((*SINGLE, f"{LOSS}.loss_mode=K3"), f"{LOSS}.loss_mode"),
        ((*SINGLE, f"{ONE}.model_path=null"), f"{ONE}.model_path"),
        ((*SEVERAL, f"++{OTHER}.key=null"), f"{OTHER}.key"),
        ((*SEVERAL, f"++{OTHER}.key=math"), f"{MODELS}.math.key"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[-1],
)
def test_what_verl_refuses_late_is_refused_and_both_take_what_is_offered(
    overrides, subject, planned, refused, refused_by_verl
):
    error = refused(*overrides)
    assert error.subject == subject
    assert refused_by_verl(*overrides)
    for way in error.remedy.replace("<its folder or name>", "/x").replace("<a data_source>", "a").split(", or "):
        typed = shlex.split(way.replace("<another data_source>", "a"))
        planned(*overrides, *typed)
        assert refused_by_verl(*overrides, *typed) is None


@pytest.mark.parametrize(
    "overrides",
    [
        SINGLE,
        (*SINGLE, f"{ONE}.inference.max_model_len=1025"),
        (*SINGLE, f"{LOSS}.loss_mode=k1", f"{LOSS}.use_policy_gradient=True"),
        (*SINGLE, f"{LOSS}.topk=null"),
        TOP_K,
        (*TOP_K, f"+{MAX_LOGPROBS}=32"),
        (*TOP_K, f"{ONE}.inference.name=sglang", f"+{MAX_LOGPROBS}=8"),
        SEVERAL,
        (*SEVERAL, f"{ONE}.inference.max_model_len=512"),  # which counts only alone
    ],
    ids=lambda value: value[-1],
)
def test_what_verl_takes_is_planned(overrides, planned, refused_by_verl):
    assert refused_by_verl(*overrides) is None
    planned(*overrides)


def test_a_longer_response_that_the_request_asks_for_counts(planned, refused):
    longer = (*SINGLE, "sharding.roles.rollout.max_new_tokens=700", f"{ONE}.inference.max_model_len=1025")
    error = refused(*longer)
    assert error.remedy == f"{ONE}.inference.max_model_len=1213"
    planned(*longer, error.remedy)


def test_the_students_lengths_count_where_an_added_teacher_does_not_follow_them(planned, refused):
    long = (*SEVERAL, "data.max_response_length=2048", f"+{OTHER}.inference.max_model_len=1100")
    error = refused(*long)
    assert error.remedy == f"{OTHER}.inference.max_model_len=2561"
    planned(*long, error.remedy)


def test_without_distillation_its_settings_do_not_matter(planned):
    planned("distillation.enabled=False", f"{ONE}.inference.max_model_len=512", f"{LOSS}.policy_loss_mode=gspo")
