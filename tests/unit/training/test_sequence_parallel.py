"""The tokens of a packed row over four ranks: logits and gradients of the whole row, whichever attention exchanges heads."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from attention_cases import packed_inputs, reference_kernel, sequences, tiny_model
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from tests import ranks
from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.training import attention, packing, sequence_parallel, varlen

NUM_RANKS = 4
LENGTHS = (7, 1, 150, 12, 5, 149, 12)
"""84 tokens a rank: sequences begin and end within slices, and two go over three of them."""

IMPLEMENTATIONS = ("sdpa_packed", "varlen_stand_in")


def register():
    attention.register()
    kernel = varlen.VarlenKernel.of(reference_kernel, dtypes=frozenset({torch.float32}), device_type="cpu")
    AttentionInterface.register("varlen_stand_in", partial(varlen.varlen_attention, kernel=kernel))
    AttentionMaskInterface.register("varlen_stand_in", packing.packed_mask)


def gradients(model, inputs, weights):
    """Logits, and gradients of a weighted sum of them."""
    logits = model(**inputs).logits
    (logits * weights).sum().backward()
    return logits.detach(), [parameter.grad for parameter in model.parameters()]


def check(rank):
    register()
    inputs = packed_inputs(sequences(LENGTHS))
    num_tokens = sum(LENGTHS) // NUM_RANKS
    here = slice(rank * num_tokens, (rank + 1) * num_tokens)
    mine = inputs | {name: inputs[name][:, here] for name in ("input_ids", "position_ids")}
    for name in ("llama", "qwen2-sliding", "gpt-neox"):  # key/value heads: fewer than ranks, and as many
        for implementation in IMPLEMENTATIONS:
            whole, model = tiny_model(name, implementation), tiny_model(name, implementation)
            weights = torch.randn(1, sum(LENGTHS), 97, generator=torch.Generator().manual_seed(3))
            expected, expected_grads = gradients(whole, inputs, weights)
            with sequence_parallel.forward_pass():
                sequence_parallel.announce(sequence_parallel.Row.gather(mine["position_ids"], dist.group.WORLD))
                found, grads = gradients(model, mine, weights[:, here])
            assert sequence_parallel.current_row() is None
            torch.testing.assert_close(found, expected[:, here], rtol=1e-5, atol=1e-5)
            for grad, expected_grad in zip(grads, expected_grads, strict=True):
                dist.all_reduce(grad)
                torch.testing.assert_close(grad, expected_grad, rtol=1e-4, atol=1e-5 * expected_grad.abs().max().item())


def test_each_rank_has_its_slice_of_the_logits_and_its_share_of_the_gradients():
    ranks.run(check, num_ranks=NUM_RANKS)


def row(*lengths, start=0):
    positions = torch.cat([torch.arange(length) for length in lengths])
    return sequence_parallel.Row(sequence_parallel.HeadExchange("none", 2), positions, start)


@pytest.mark.parametrize("builder", [packing.packed_mask, packing.grouped_mask])
def test_a_mask_that_is_not_the_one_of_the_positions_is_refused(builder):
    with sequence_parallel.forward_pass():
        sequence_parallel.announce(row(3, 5))
        with pytest.raises(ConfigError, match="mask"):
            builder(1, 4, 4, mask_function=causal_mask_function)  # as if the four tokens were of one sequence


def test_boundaries_are_those_of_the_whole_row():
    def second_of_two(_batch, _head, query, key):
        return (key <= query) & (
            (query == 0) == (key == 0)
        )  # tokens 4 to 7: one of the first sequence, three of the second

    with sequence_parallel.forward_pass():
        sequence_parallel.announce(row(5, 3, start=4))
        mask = packing.packed_mask(1, 4, 4, mask_function=second_of_two)
    assert mask.cu_seqlens.tolist() == [0, 5, 8]
    assert mask.max_length == 5
    assert mask.exchange == sequence_parallel.HeadExchange("none", 2)
