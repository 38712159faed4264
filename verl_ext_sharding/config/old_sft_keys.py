"""The keys of verl's older SFT configs that `verl.trainer.sft_trainer` of 0.9.1 lacks, each with what to write now.

Most are those of `verl.trainer.fsdp_sft_trainer`, which 0.7.0 was the last to have: its config (`sft_trainer.yaml` of 0.4.1
to 0.7.0) compared with `sft_trainer_engine.yaml`, and each place checked in 0.9.1's source.
"""

from __future__ import annotations

from verl_ext_sharding.config.old_keys_table import Replacement

_TRAINER = "verl.trainer.sft_trainer took the place of fsdp_sft_trainer"
_ENGINE = f"{_TRAINER}, and sets FSDP in the engine's block"
_OFFLOAD = f"{_ENGINE}, whose offload_policy acts with engine.strategy=fsdp2 alone"
_MESSAGES = f"{_TRAINER}, and reads conversations only: a column of messages, whose name is data.messages_key"


def _schedule(name: str) -> str:
    """verl asserts that its FSDP engines are asked for one of two (`FSDPOptimizerConfig`, workers/config/optimizer.py)."""
    if name not in ("constant", "cosine"):
        raise ValueError(name)
    return name


SFT = (
    Replacement(old="model.partial_pretrain", since="0.7.1", reason=_TRAINER, new=("model.path",)),
    Replacement(old="model.strategy", since="0.7.1", reason=_ENGINE, new=("engine.strategy",)),
    Replacement(
        old="model.fsdp_config.cpu_offload",
        since="0.7.1",
        reason=_OFFLOAD,
        new=("engine.offload_policy",),
        needs=("engine.strategy=fsdp2",),
    ),
    Replacement(
        old="model.fsdp_config.offload_params",
        since="0.7.1",
        reason=f"{_OFFLOAD}, for parameters too",
    ),
    Replacement(
        old="model.fsdp_config.wrap_policy.*",
        since="0.7.1",
        reason=_ENGINE,
        new=("engine.wrap_policy.*", "+engine.wrap_policy.*"),
    ),
    Replacement(old="model.fsdp_config.*", since="0.7.1", reason=_ENGINE, new=("engine.*",)),
    Replacement(
        old="ulysses_sequence_parallel_size",
        since="0.7.1",
        reason=_ENGINE,
        new=("engine.ulysses_sequence_parallel_size",),
    ),
    Replacement(old="use_remove_padding", since="0.7.1", reason=_TRAINER, new=("model.use_remove_padding",)),
    Replacement(old="optim.warmup_steps_ratio", since="0.6", reason=_TRAINER, new=("optim.lr_warmup_steps_ratio",)),
    Replacement(
        old="optim.lr_scheduler",
        since="0.7.1",
        reason=f"{_TRAINER}, whose FSDP engine schedules constant or cosine",
        new=("optim.lr_scheduler_type",),
        value=_schedule,
    ),
    Replacement(
        old="data.micro_batch_size",
        since="0.7.1",
        reason=f"{_TRAINER}, and counts the samples of one GPU, not of all, where data.use_dynamic_bsz is off",
        new=("data.micro_batch_size_per_gpu",),
        value=lambda _: "<samples>",
        needs=("data.use_dynamic_bsz=False",),
    ),
    *(
        Replacement(old=f"data.{name}", since="0.7.1", reason=_MESSAGES)
        for name in ("prompt_key", "response_key", "prompt_dict_keys", "response_dict_keys", "multiturn.enable")
    ),
    Replacement(old="data.multiturn.*", since="0.7.1", reason=_MESSAGES, new=("data.*",)),
    Replacement(old="data.chat_template", since="0.7.1", reason=_TRAINER, new=("model.custom_chat_template",)),
    Replacement(old="trainer.resume_path", since="0.5", reason=_TRAINER, new=("trainer.resume_from_path",)),
    Replacement(
        old="trainer.checkpoint.*", since="0.7.1", reason="checkpoints have a block of their own", new=("checkpoint.*",)
    ),
    Replacement(
        old="checkpoint.mbridge_config.*", since="0.9", reason="Megatron's bridge is set in the engine's block"
    ),
)
"""Keys that verl's SFT configs of 0.4.1 to 0.8.0 had."""
