"""Case D7: token ids out of range (verl#1398)."""

import pytest
import torch

from verl_ext_sharding.errors import TokenIdError
from verl_ext_sharding.training.guards import TokenGuard

TOKENIZER, ROWS = 151665, 152064
GAP_ID = 151908
REWARD_ROWS = 128256


def actor(policy):
    return TokenGuard(role="actor", policy=policy, rows=ROWS, tokenizer_size=TOKENIZER, pad_token_id=151643)


# a: an id between the tokenizer and the embedding's rows


@pytest.mark.parametrize(("policy", "ids"), [("error", [100, GAP_ID]), ("mask", [100, 151643]), ("off", [100, GAP_ID])])
def test_an_unmapped_id_is_treated_as_the_policy_says_and_crashes_nothing(policy, ids):
    checked = actor(policy).check(torch.tensor([[100, GAP_ID]]))
    assert checked.input_ids.tolist() == [ids]


@pytest.mark.parametrize(("policy", "counted"), [("error", 1), ("mask", 1), ("off", 0)])
def test_an_unmapped_id_is_counted_where_ids_are_looked_at(policy, counted):
    assert actor(policy).check(torch.tensor([[100, GAP_ID]])).counts["unmapped"] == counted


# b: the policy's ids, sent raw to a reward model of another vocabulary


@pytest.mark.parametrize("part", ["reward", "140000", "128256"])
def test_ids_of_another_vocabulary_are_refused_with_role_id_and_rows(part):
    reward = TokenGuard(role="reward", policy="error", rows=REWARD_ROWS)
    with pytest.raises(TokenIdError, match=part):
        reward.check(torch.tensor([[140000]]))


def test_they_are_refused_before_an_embedding_reads_them():
    reward, embedding = TokenGuard(role="reward", policy="error", rows=8), torch.nn.Embedding(8, 2)
    read = []
    embedding.register_forward_pre_hook(lambda *_: read.append(True))
    with pytest.raises(TokenIdError):
        embedding(reward.check(torch.tensor([[9]])).input_ids)
    assert read == []


# c: a label id under an attention mask of 0


def test_an_id_under_a_mask_of_zero_is_reported_and_not_fatal():
    checked = actor("error").check(torch.tensor([[-100, 5]]), torch.tensor([[0, 1]]))
    assert checked.counts["negative"] == 1
    assert checked.input_ids.tolist() == [[151643, 5]]


def test_a_normal_batch_comes_back_as_the_same_object():
    ids = torch.tensor([[100, 5]])
    assert actor("error").check(ids, torch.tensor([[0, 1]])).input_ids is ids
