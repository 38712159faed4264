"""What `engine_runs` trains: a role, its measures, verl's own keys, and the run that it must agree with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from verl_ext_sharding.config.measures import LayerSpread, RoleMeasures

KEPT_BYTES = "16MiB"
"""A byte budget between what `full` and no checkpointing keep in the layers, see `test_measures`."""


@dataclass(kw_only=True, frozen=True)
class Size:
    """Sequences of one micro-batch: how many, and the range of lengths of prompts and of responses."""

    sequences: int
    prompt: tuple[int, int]
    response: tuple[int, int]


SMALL = Size(sequences=4, prompt=(8, 24), response=(8, 32))
MEDIUM = Size(sequences=4, prompt=(64, 128), response=(160, 200))
LARGE = Size(sequences=16, prompt=(64, 128), response=(200, 232))
"""So many tokens that the input of a layer is over the mebibyte from which activations are offloaded."""


@dataclass(kw_only=True, frozen=True)
class Case:
    """One engine, built, trained for two steps and asked for what it holds.

    Args:
        name: Key of the result.
        role: actor, critic or ref.
        measures: Of that role, as the run's spec carries them.
        model: Fields of verl's `HFModelConfig` that differ from `engine_runs.MODEL`.
        engine: Fields of verl's `FSDPEngineConfig` that differ from `engine_runs.ENGINE`.
        like: Name of the run that it is compared with, made before; None: nothing.
        size: Of its batches.
        model_name: Of the model, see `engine_runs.folder_of`.
        reads_logits: Batches that need the logits themselves are tried too.
        one_rank: It is run on one rank only.
        two_ranks: It is run on two ranks only.
        same_data: Each rank has the batches of the first.
        flash_attn: It is run as if flash-attn were installed and there were a card, see `engine_runs.flash_attn`.
    """

    name: str
    role: str = "actor"
    measures: RoleMeasures = field(default_factory=RoleMeasures)
    model: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    like: str | None = None
    size: Size = MEDIUM
    model_name: str = "qwen2"
    reads_logits: bool = False
    one_rank: bool = False
    two_ranks: bool = False
    same_data: bool = False
    flash_attn: bool = False

    @property
    def compiled(self) -> bool:
        """Whether its layers are compiled, which looking at each operation would keep them from."""
        policy = self.measures.checkpointing
        return isinstance(policy, Mapping) and bool(policy.get("compile"))

    def runs_on(self, num_ranks: int) -> bool:
        """Whether it is run on so many ranks, 1 or 2."""
        return not (self.one_rank if num_ranks == 2 else self.two_ranks)


PADDED = {"use_remove_padding": False}
LORA = {"lora_rank": 8, "lora_alpha": 16}
MERGED = LORA | {"lora": {"merge": True}}
VERLS_OFFLOAD = {"enable_gradient_checkpointing": True, "enable_activation_offload": True}
EAGER = {"override_config": {"attn_implementation": "eager"}}

POLICIES: dict[str, Any] = {
    "full": {"policy": "full"},
    "every_2": {"policy": "every_n", "every": 2},
    "selective": {"policy": "selective"},
    "share": {"policy": "budget", "budget": 0.5},
    "bytes": {"policy": "budget", "budget": KEPT_BYTES},
    "auto": True,
}
"""Each is a case, compared with `none`."""


def _offload() -> list[Case]:
    policies = {"offload": None, "offload_full": POLICIES["full"], "offload_selective": POLICIES["selective"]}
    chunked = RoleMeasures(logits="chunked")
    ours = [
        Case(
            name=name,
            measures=RoleMeasures(checkpointing=policy, offload_activations=True, logits="chunked"),
            model=PADDED,
            like="large",
            size=LARGE,
        )
        for name, policy in policies.items()
    ]
    large_full = RoleMeasures(logits="chunked", checkpointing=POLICIES["full"])
    return [
        Case(name="large", measures=chunked, model=PADDED, size=LARGE),
        Case(name="large_full", measures=large_full, model=PADDED, like="large", size=LARGE),
        *ours,
        Case(name="offload_verls_keys", measures=chunked, model=PADDED | VERLS_OFFLOAD, like="large", size=LARGE),
    ]


def _logits() -> list[Case]:
    names = ("full", "chunked", "fused", "auto")
    padded = [
        Case(name=f"logits_{name}", measures=RoleMeasures(logits=name), model=PADDED, like="none", reads_logits=True)
        for name in names
    ]
    packed = [
        Case(
            name=f"packed_logits_{name}",
            measures=RoleMeasures(attention="sdpa", logits=name),
            model={"use_fused_kernels": name == "chunked"},  # verl's own, which gives way
            like="packed",
            reads_logits=True,
        )
        for name in names
    ]
    return [
        *padded,
        Case(name="packed", measures=RoleMeasures(attention="sdpa"), like="none", reads_logits=True),
        *packed,
        Case(name="tied", model=PADDED, model_name="qwen2_tied"),
        Case(
            name="tied_fused", measures=RoleMeasures(logits="fused"), model=PADDED, like="tied", model_name="qwen2_tied"
        ),
    ]


def _attention() -> list[Case]:
    cases = []
    for role in ("actor", "critic"):
        reference = f"{role}_eager"
        cases.append(Case(name=reference, role=role, model=PADDED | EAGER, size=SMALL))
        cases += [
            Case(
                name=f"{role}_{padding}_{name}",
                role=role,
                measures=RoleMeasures(attention=name),
                model={"use_remove_padding": padding == "packed"},
                like=reference,
                size=SMALL,
                one_rank=True,
            )
            for padding in ("padded", "packed")
            for name in ("auto", "sdpa", "eager")
        ]
    return cases


def _delta_net() -> list[Case]:
    """Qwen3.5, whose gated delta nets save a tuple (verl#7472)."""
    chunked, offload = RoleMeasures(logits="chunked"), RoleMeasures(logits="chunked", offload_activations=True)
    cases = {"delta": (chunked, {}), "delta_offload": (offload, {}), "delta_verls_keys": (chunked, VERLS_OFFLOAD)}
    return [
        Case(
            name=name,
            measures=measures,
            model=PADDED | model,
            like="delta" if name != "delta" else None,
            size=LARGE,
            model_name="qwen3_5",
            one_rank=True,
        )
        for name, (measures, model) in cases.items()
    ]


COMPILED = {"policy": "budget", "budget": 0.3, "compile": True}


def _flash() -> list[Case]:
    """Where flash-attn is installed: asked for, and as verl's own choice with layers that are compiled."""
    measures = RoleMeasures(logits="chunked", checkpointing=COMPILED)
    stock = {"override_config": {"attn_implementation": "flash_attention_2"}}
    asked = RoleMeasures(attention="flash_attention_2", logits="chunked")
    cases = [
        Case(name="flash", measures=asked, like="packed"),
        Case(name="flash_compiled", measures=measures, model=stock, like="flash"),
    ]
    return [replace(case, flash_attn=True, one_rank=True) for case in cases]


def _rows() -> list[Case]:
    """Ulysses: the tokens of a packed row over two ranks, which have the same batches, as its whole row on each has."""
    ulysses = {"ulysses_sequence_parallel_size": 2}
    full = POLICIES["full"]
    actor, critic = RoleMeasures(attention="sdpa", logits="chunked"), RoleMeasures(attention="sdpa")
    cases = [
        Case(name="rows", measures=actor),
        Case(name="ulysses", measures=actor, engine=ulysses, like="rows"),
        Case(
            name="ulysses_all",
            measures=RoleMeasures(attention="auto", logits="fused", checkpointing=full, offload_activations=True),
            engine=ulysses,
            like="rows",
        ),
        Case(
            name="ulysses_flash",
            measures=RoleMeasures(attention="flash_attention_2", logits="chunked", checkpointing=COMPILED),
            engine=ulysses,
            like="rows",
            flash_attn=True,
        ),
        Case(name="rows_lora", measures=actor, model=LORA),
        Case(name="ulysses_lora", measures=actor, model=LORA, engine=ulysses, like="rows_lora"),
        Case(name="rows_critic", role="critic", measures=critic),
        Case(
            name="ulysses_critic",
            role="critic",
            measures=replace(critic, checkpointing=full),
            engine=ulysses,
            like="rows_critic",
        ),
    ]
    return [replace(case, two_ranks=True, same_data=True) for case in cases]


def _lora() -> list[Case]:
    full = RoleMeasures(attention="sdpa", logits="chunked", checkpointing=POLICIES["full"], offload_activations=True)
    fused = RoleMeasures(attention="sdpa", logits="fused", checkpointing=POLICIES["share"], offload_activations=True)
    return [
        Case(name="lora", measures=RoleMeasures(attention="sdpa", logits="chunked"), model=LORA, size=LARGE),
        Case(name="lora_full_offload", measures=full, model=LORA, like="lora", size=LARGE),
        Case(name="lora_all", measures=fused, model=LORA, like="lora", size=LARGE),
        Case(name="critic_lora", role="critic", measures=RoleMeasures(attention="sdpa"), model=LORA),
        Case(
            name="critic_lora_all",
            role="critic",
            measures=RoleMeasures(attention="sdpa", checkpointing=POLICIES["full"], optimizer_per_step=True),
            model=LORA,
            like="critic_lora",
        ),
    ]


def _spread() -> list[Case]:
    """One process with the layers on several (logical) devices, against FSDP2 with one rank."""
    layers = LayerSpread(device_map="auto", devices=(0, 1, 2, 3))
    full = {"attention": "sdpa", "logits": "chunked", "checkpointing": POLICIES["full"], "offload_activations": True}
    every = {"optimizer_per_step": True, "checkpointing": POLICIES["share"]}
    bf16 = {"mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}}
    offload = {"param_offload": True, "optimizer_offload": True}
    explicit = LayerSpread(
        device_map={"embed": 0, "layers 0-1": 1, "layers 2-3": 0, "norm": 1, "lm_head": 1}, devices=(5, 3)
    )
    cases = [
        Case(name="spread", measures=RoleMeasures(layers=layers), model=PADDED, like="none", reads_logits=True),
        Case(name="spread_explicit", measures=RoleMeasures(layers=explicit, **every), model=PADDED, like="none"),
        Case(
            name="spread_tied", measures=RoleMeasures(layers=layers), like="tied", model=PADDED, model_name="qwen2_tied"
        ),
        Case(name="spread_offload", measures=RoleMeasures(layers=layers), model=PADDED, engine=offload, like="none"),
        Case(name="bf16", model=PADDED, engine=bf16),
        Case(name="spread_bf16", measures=RoleMeasures(layers=layers), model=PADDED, engine=bf16, like="bf16"),
        Case(name="spread_lora", measures=RoleMeasures(layers=layers, **full), model=LORA, like="lora", size=LARGE),
        Case(name="merged", measures=RoleMeasures(**full), model=MERGED, size=LARGE),
        Case(
            name="spread_merged", measures=RoleMeasures(layers=layers, **full), model=MERGED, like="merged", size=LARGE
        ),
        Case(name="spread_all", measures=replace(ALL, layers=layers), like="large", size=LARGE),
        Case(
            name="spread_critic",
            role="critic",
            measures=RoleMeasures(layers=layers, checkpointing=POLICIES["full"]),
            model=PADDED,
            like="critic",
            size=LARGE,
        ),
        Case(
            name="spread_critic_lora",
            role="critic",
            measures=RoleMeasures(layers=layers, checkpointing=POLICIES["full"]),
            model=PADDED | LORA,
            like="critic_lora",
        ),
        Case(
            name="spread_ref",
            role="ref",
            measures=RoleMeasures(layers=layers),
            model=PADDED,
            engine={"forward_only": True},
            like="ref",
        ),
    ]
    return [replace(case, one_rank=True) for case in cases]


def _critic() -> list[Case]:
    measures = RoleMeasures(checkpointing=POLICIES["full"], offload_activations=True, optimizer_per_step=True)
    return [
        Case(name="critic", role="critic", model=PADDED, size=LARGE),
        Case(name="critic_all", role="critic", measures=measures, model=PADDED, like="critic", size=LARGE),
    ]


def _ref() -> list[Case]:
    engine = {"forward_only": True}
    measured = [
        Case(
            name=f"ref_{name}",
            role="ref",
            measures=RoleMeasures(attention="sdpa", logits=name),
            engine=engine,
            like="ref",
        )
        for name in ("chunked", "fused")
    ]
    return [
        Case(name="ref", role="ref", model=PADDED, engine=engine),
        *measured,
        Case(name="ref_verls_keys", role="ref", model=PADDED | VERLS_OFFLOAD, engine=engine, like="ref"),
    ]


ALL = RoleMeasures(
    attention="auto",
    logits="auto",
    checkpointing={"policy": "budget", "budget": 0.3},
    offload_activations=True,
    optimizer_per_step=True,
)
COMBINED = Case(name="combined", measures=ALL, like="large", size=LARGE)
"""Everything at once, packed. Its checkpoint is loaded again, with and without the measures."""

CASES = [
    Case(name="none", model=PADDED, reads_logits=True),
    *(
        Case(name=name, measures=RoleMeasures(checkpointing=policy), model=PADDED, like="none")
        for name, policy in POLICIES.items()
    ),
    Case(name="step", measures=RoleMeasures(optimizer_per_step=True), model=PADDED, like="none"),
    *_logits(),
    *_attention(),
    *_offload(),
    COMBINED,
    *_delta_net(),
    *_lora(),
    *_critic(),
    *_ref(),
    *_spread(),
    *_rows(),
    *_flash(),
]
