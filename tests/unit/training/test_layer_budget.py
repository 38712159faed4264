"""Budgets hold for models whose layers see other tokens: a vision tower beside the decoder, before or behind it, frozen or not."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from checkpointing_models import qwen2
from torch import nn
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from verl_ext_sharding.training.checkpointing import Budget, Full, Off
from verl_ext_sharding.training.saved_bytes import LiveStorages

WIDTH, IMAGE, PATCH = 64, 90, 96

SHAPES = {"large image and short text": (28, 40), "small image and long text": (8, 700)}
"""Patches on each side of the image, and tokens of text after it."""


def qwen3_vl() -> nn.Module:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    sizes = {"hidden_size": WIDTH, "intermediate_size": 192}
    patches = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 16}
    config = Qwen3VLConfig(
        text_config={**sizes, **heads, "vocab_size": 97, "num_hidden_layers": 6, "rope_parameters": rope},
        vision_config={**sizes, **patches, "depth": 6, "num_heads": 4, "out_hidden_size": WIDTH}
        | {"deepstack_visual_indexes": [1]},
        image_token_id=IMAGE,
        video_token_id=91,
        vision_start_token_id=92,
        vision_end_token_id=93,
    )
    config._attn_implementation = "sdpa"
    return Qwen3VLForConditionalGeneration(config).train()


def image_and_text(side: int, num_tokens: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    image = torch.tensor([92, *[IMAGE] * (side * side // 4), 93])
    ids = torch.cat([image, torch.randint(0, 80, (num_tokens,))])[None]
    pixels = {"pixel_values": torch.randn(side * side, PATCH), "image_grid_thw": torch.tensor([[1, side, side]])}
    return {"input_ids": ids, **pixels, "mm_token_type_ids": (ids == IMAGE).long()}


def text(num_tokens: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(0, 80, (1, num_tokens), generator=torch.Generator().manual_seed(1))}


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 192), nn.Linear(192, WIDTH)

    def forward(self, hidden_states):
        return hidden_states + self.down(nn.functional.silu(self.up(hidden_states)))


class TextBlock(_Block): ...


class VisionBlock(_Block): ...


class TowerBehind(nn.Module):
    """Has its tower behind the decoder, as Ernie-4.5-VL, and calls it first, once for each image."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.decoder = nn.ModuleList(TextBlock() for _ in range(6))
        self.tower = nn.ModuleList(VisionBlock() for _ in range(6))

    @property
    def layers(self) -> list[nn.Module]:
        return [*self.decoder, *self.tower]

    def forward(self, images, hidden_states):
        for image in images:
            for block in self.tower:
                image = block(image)
            hidden_states = hidden_states + image.mean()
        for block in self.decoder:
            hidden_states = block(hidden_states)
        return hidden_states


def images_and_hidden(num_patches: tuple[int, ...], num_tokens: int):
    torch.manual_seed(3)
    return [torch.randn(count, WIDTH) for count in num_patches], torch.randn(1, num_tokens, WIDTH)


def run(model, *args, **kwargs):
    """Bytes kept and gradients of one forward and backward pass."""
    model.zero_grad(set_to_none=True)
    with LiveStorages() as made:
        output = model(*args, **kwargs)
        output = getattr(output, "last_hidden_state", output)
        num_bytes = made.total_bytes()
    output.square().mean().backward()
    return num_bytes, [p.grad for p in model.parameters()]


def assert_equal(one, other):
    for left, right in zip(one, other, strict=True):
        assert left is right is None or torch.equal(left, right)


@pytest.fixture(scope="module")
def vl():
    """A model with a tower, and by the name of a shape its inputs, what layers keep at most and at least, and gradients."""
    model, known = qwen3_vl(), {}
    for name, (side, num_tokens) in SHAPES.items():
        inputs = image_and_text(side, num_tokens)
        Off().apply(model)
        most, gradients = run(model.model, **inputs, use_cache=False)
        Full().apply(model)
        known[name] = inputs, most, run(model.model, **inputs, use_cache=False)[0], gradients
    return model, known


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7])
def test_a_share_holds_from_the_first_pass_on_whichever_of_tower_and_decoder_has_more_tokens(vl, share):
    model, known = vl
    Budget(share=share, compile=False).apply(model)
    for inputs, most, least, expected in (*known.values(), *known.values()):
        kept, gradients = run(model.model, **inputs, use_cache=False)
        assert share / 2 * most < kept <= share * most + least
        assert_equal(gradients, expected)


@pytest.mark.parametrize("share", [0.3, 0.5])
@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_hold_from_the_second_pass_on_whichever_of_tower_and_decoder_has_more_tokens(vl, shape, share):
    model, known = vl
    inputs, most, least, expected = known[shape]
    budget = int(share * most)
    Budget(kept_bytes=budget, compile=False).apply(model)
    run(model.model, **inputs, use_cache=False)
    kept, gradients = run(model.model, **inputs, use_cache=False)
    assert budget / 2 < kept <= budget + least
    assert_equal(gradients, expected)


def test_bytes_hold_when_both_shapes_have_run_and_text_alone_between_them_has_all_of_the_budget(vl):
    model, known = vl
    alone = text(300)
    Off().apply(model)
    everything, _ = run(model.model, **alone, use_cache=False)
    budget = int(1.1 * everything)
    Budget(kept_bytes=budget, compile=False).apply(model)
    passes = [*known.values()] * 2
    for number, (inputs, most, least, _) in enumerate(passes):
        assert most > 2 * budget
        kept, _ = run(model.model, **inputs, use_cache=False)
        assert number < len(known) or kept <= budget + least
        kept, _ = run(model.model, **alone, use_cache=False)
        assert number == 0 or kept == everything


@pytest.mark.parametrize("shape", [((900,), 100), ((60,), 900), ((400, 500), 200)], ids=str)
@pytest.mark.parametrize("dropped", [False, True], ids=["", "after a pass without a backward pass"])
def test_a_budget_holds_where_the_tower_stands_behind_the_decoder_and_runs_first(shape, dropped):
    model, inputs = TowerBehind(), images_and_hidden(*shape)
    most, expected = run(model, *inputs)
    Full().apply(model, layers=model.layers)
    least, _ = run(model, *inputs)
    for budget in (Budget(share=0.5, compile=False), Budget(kept_bytes=most // 2, compile=False)):
        budget.apply(model, layers=model.layers)
        for _ in range(2):
            run(model, *inputs)
        if dropped:
            model(*inputs)
        kept, gradients = run(model, *inputs)
        assert most / 4 < kept <= most / 2 + least / 2
        assert_equal(gradients, expected)


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_a_budget_holds_where_layers_of_two_classes_take_turns(share):
    model = nn.Sequential(*(TextBlock() if index % 4 else VisionBlock() for index in range(16)))
    inputs = torch.randn(200, WIDTH)
    most, expected = run(model, inputs)
    for budget in (Budget(share=share, compile=False), Budget(kept_bytes=int(share * most), compile=False)):
        budget.apply(model, layers=list(model))
        run(model, inputs)
        kept, gradients = run(model, inputs)
        assert 0.7 * share * most < kept <= share * most + inputs.nbytes
        assert_equal(gradients, expected)


def test_passes_that_are_held_together_count_together():
    model, inputs = TowerBehind(), images_and_hidden((200,), 200)
    most, _ = run(model, *inputs)
    Budget(kept_bytes=most, compile=False).apply(model, layers=model.layers)
    run(model, *inputs)
    with LiveStorages() as made:
        held = [model(*inputs) for _ in range(2)]
        assert made.total_bytes() < 1.3 * most
    del held


@pytest.mark.parametrize("frozen", ["tower", "first layers"])
def test_layers_without_gradients_take_no_part_of_a_budget_and_are_not_checkpointed(frozen):
    model, inputs = TowerBehind(), images_and_hidden((900,), 100)
    for parameter in chain.from_iterable(block.parameters() for block in (*model.tower, *model.decoder[:2])):
        parameter.requires_grad_(False)
    if frozen == "tower":
        model.decoder.requires_grad_(True)
    most, expected = run(model, *inputs)
    for budget in (Budget(share=0.5, compile=False), Budget(kept_bytes=most // 2, compile=False)):
        budget.apply(model, layers=model.layers)
        run(model, *inputs)
        kept, gradients = run(model, *inputs)
        assert most / 3 < kept <= most / 2 + 100 * WIDTH * 4
        assert_equal(gradients, expected)
    Budget(kept_bytes=most, compile=False).apply(model, layers=model.layers)
    run(model, *inputs)
    assert run(model, *inputs)[0] == most


def test_layers_that_never_run_are_no_part_of_a_share_after_the_first_pass():
    model, inputs = qwen2(12), {"input_ids": torch.arange(80)[None], "use_cache": False}
    run(model.model, **inputs)
    model.model.config.num_hidden_layers = 4
    most, _ = run(model.model, **inputs)
    Budget(share=0.5, compile=False).apply(model)
    run(model.model, **inputs)
    assert most / 4 < run(model.model, **inputs)[0] <= most / 2 + 80 * WIDTH * 4
