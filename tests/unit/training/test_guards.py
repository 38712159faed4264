"""Token guards and what is said of a device-side assert: no GPU needed, since they act before one."""

import pickle

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from verl_ext_sharding.errors import TokenIdError
from verl_ext_sharding.training.device_asserts import explain_device_assert
from verl_ext_sharding.training.guards import TokenGuard

ROWS, KNOWN, PAD = 100, 90, 3


def guard(policy="error", **changes):
    settings = {"role": "actor", "policy": policy, "rows": ROWS, "tokenizer_size": KNOWN, "pad_token_id": PAD}
    return TokenGuard(**{**settings, **changes})


def jagged(*rows):
    return torch.nested.nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def dense(*rows):
    return torch.tensor(rows)


def error_of(ids, mask=None, **changes):
    with pytest.raises(TokenIdError) as caught:
        guard(**changes).check(ids, mask)
    return caught.value


CLEAN = {
    "dense": dense([1, 2], [3, 89]),
    "int32": dense([1, 2], [3, 4]).to(torch.int32),
    "packed": torch.tensor([0, 89, 5]),
    "packed with a batch dim": torch.tensor([[0, 89, 5]]),
    "jagged": jagged([1, 2, 3], [4]),
    "empty": torch.zeros(2, 0, dtype=torch.int64),
    "first and last row": torch.tensor([0, KNOWN - 1]),
}


# Clean batches


@pytest.mark.parametrize("ids", CLEAN.values(), ids=CLEAN)
@pytest.mark.parametrize("policy", ["error", "mask", "off"])
def test_a_clean_batch_passes_as_the_same_object(ids, policy):
    checked = guard(policy).check(ids)
    assert checked.input_ids is ids
    assert checked.replaced is None
    assert set(checked.counts.values()) == {0}


class Reductions(TorchDispatchMode):
    """Names the operations that read a whole batch."""

    def __init__(self, size):
        super().__init__()
        self.size, self.seen = size, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(isinstance(arg, torch.Tensor) and arg.numel() == self.size for arg in args):
            self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("policy", ["error", "mask"])
def test_a_clean_batch_costs_one_reduction(policy):
    ids, mask = torch.randint(0, KNOWN, (8, 64)), torch.ones(8, 64)
    with Reductions(ids.numel()) as seen:
        guard(policy).check(ids, mask)
    assert seen.seen == ["aminmax"]


def test_off_looks_at_nothing():
    ids = dense([-5, 10**6])
    with Reductions(ids.numel()) as seen:
        assert guard("off").check(ids).input_ids is ids
    assert seen.seen == []


# Malformed batches

MALFORMED = {
    "negative": (dense([1, 2], [-1, 4]), None, "id -1 at sequence 1, position 0"),
    "label": (dense([1, -100]), None, "id -100 at sequence 0, position 1"),
    "label in an attended place": (dense([1, -100]), dense([1, 1]), "id -100 at sequence 0, position 1"),
    "at the rows": (dense([ROWS, 2]), None, "id 100 at sequence 0, position 0"),
    "above the rows": (dense([1, 2], [3, 151908]), None, "id 151908 at sequence 1, position 1"),
    "lowest int64": (dense([1, -(2**63)]), None, "id -9223372036854775808 at sequence 0, position 1"),
    "highest int64": (dense([1, 2**63 - 1]), None, "id 9223372036854775807 at sequence 0, position 1"),
    "int32": (dense([1, 2**31 - 1]).to(torch.int32), None, "id 2147483647 at sequence 0, position 1"),
    "packed": (torch.tensor([1, 2, 500]), None, "id 500 at position 2"),
    "jagged": (jagged([1, 2], [3], [4, 5, 100]), None, "id 100 at sequence 2, position 2"),
    "jagged, first of a sequence": (jagged([1, 2], [-7], [4]), None, "id -7 at sequence 1, position 0"),
    "jagged with a mask": (jagged([-1, 2], [300]), jagged([0, 1], [1]), "id 300 at sequence 1, position 0"),
    "several": (dense([-1, 200, 300]), None, "id -1 at sequence 0, position 0, and 2 more"),
    "bad padding before a bad id": (dense([-1, 200]), dense([0, 1]), "id 200 at sequence 0, position 1"),
    "floats": (torch.tensor([[1.0, 2.0]]), None, "torch.float32 ids"),
    "booleans": (torch.tensor([[True]]), None, "torch.bool ids"),
    "mask of another shape": (dense([1, 2]), dense([1, 1, 1]), "ids [1, 2], mask [1, 3]"),
    "mask of another layout": (jagged([1, 2], [3]), dense([1, 1]), "nested with 3 tokens in 2 sequences, mask [1, 2]"),
    "strided nested": (torch.nested.nested_tensor([torch.tensor([1])]), None, "torch.strided"),
}


@pytest.mark.parametrize(("ids", "mask", "found"), MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_batch_ends_in_an_error_that_says_what_and_where(ids, mask, found):
    error = error_of(ids, mask)
    assert found in error.found
    assert error.subject == "token ids of the actor"


def test_the_error_names_the_rows_and_what_the_tokenizer_knows():
    assert error_of(dense([200])).expected == "ids from 0 to 99: its embedding has 100 rows, and the tokenizer knows 90"


def test_the_error_names_the_override_that_goes_on():
    assert "sharding.guards.token_ids=mask replaces such ids by 3" in error_of(dense([200])).remedy


def test_the_error_survives_pickling_as_ray_does_it():
    error = error_of(dense([200]))
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_mask_does_not_let_ids_of_a_wrong_dtype_pass():
    assert "torch.float32" in error_of(torch.tensor([[1.0]]), policy="mask").found


def test_a_pad_token_without_a_row_is_refused_at_once():
    with pytest.raises(TokenIdError, match="pad_token_id 100"):
        guard(pad_token_id=ROWS)


# What is replaced


def test_mask_replaces_every_bad_id_and_says_where():
    checked = guard("mask").check(dense([-1, 5], [95, 100]))
    assert checked.input_ids.tolist() == [[PAD, 5], [PAD, PAD]]
    assert checked.replaced.tolist() == [[True, False], [True, True]]
    assert checked.counts == {"negative": 1, "out_of_rows": 1, "unmapped": 1}


def test_mask_leaves_the_callers_batch_as_it_was():
    ids = dense([-1, 5])
    guard("mask").check(ids)
    assert ids.tolist() == [[-1, 5]]


def test_without_a_pad_token_the_first_row_takes_its_place():
    assert guard("mask", pad_token_id=None).check(dense([200, 1])).input_ids.tolist() == [[0, 1]]


@pytest.mark.parametrize("policy", ["error", "mask"])
def test_an_id_without_a_row_under_a_mask_of_zero_is_replaced_and_reported(policy):
    checked = guard(policy).check(dense([-100, 5], [5, 400]), dense([0, 1], [1, 0]))
    assert checked.input_ids.tolist() == [[PAD, 5], [5, PAD]]
    assert checked.counts == {"negative": 1, "out_of_rows": 1, "unmapped": 0}


def test_error_counts_an_unmapped_id_and_keeps_it_since_it_has_a_row():
    ids = dense([1, 95])
    checked = guard("error").check(ids)
    assert checked.input_ids is ids
    assert checked.counts["unmapped"] == 1


def test_an_unmapped_pad_id_under_a_mask_of_zero_is_no_event():
    checked = guard("mask", pad_token_id=95).check(dense([95, 1]), dense([0, 1]))
    assert checked.counts["unmapped"] == 0
    assert checked.replaced is None


def test_without_a_tokenizer_size_nothing_is_unmapped():
    assert guard("mask", tokenizer_size=None).check(dense([95])).counts["unmapped"] == 0


def test_a_tokenizer_larger_than_the_embedding_does_not_hide_ids_without_a_row():
    assert "id 100" in error_of(dense([100]), tokenizer_size=120).found


def test_a_jagged_batch_keeps_its_sequences():
    ids = jagged([1, 2, 300], [4])
    checked = guard("mask").check(ids)
    assert [row.tolist() for row in checked.input_ids.unbind()] == [[1, 2, PAD], [4]]
    assert checked.input_ids.offsets() is ids.offsets()


def test_what_was_replaced_can_be_taken_out_of_a_jagged_loss_mask():
    ids = jagged([1, 2, 300], [4])
    checked = guard("mask").check(ids)
    loss_mask = torch.nested.nested_tensor_from_jagged(torch.ones(4), offsets=ids.offsets())
    assert (loss_mask * ~checked.replaced).values().tolist() == [1, 1, 0, 1]


def test_an_embedding_can_read_what_mask_returns():
    checked = guard("mask").check(dense([-100, 5, 95, 10**6]))
    torch.nn.Embedding(ROWS, 2)(checked.input_ids)


# Counts and descriptions


def test_each_kind_of_id_is_counted():
    counts = guard("mask").check(dense([-1, 95, 95, 400])).counts
    assert counts == {"negative": 1, "out_of_rows": 1, "unmapped": 2}


def test_a_clean_batch_has_the_same_counts_at_zero():
    assert guard().check(dense([1])).counts == dict.fromkeys(guard("mask").check(dense([-1])).counts, 0)


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        (dense([1, 2, 3], [4, 5, 60]), "2 x 3 tokens, ids 1 to 60"),
        (jagged([1, 2], [7]), "2 sequences, 3 tokens, ids 1 to 7"),
        (torch.zeros(0, dtype=torch.int64), "0 tokens"),
    ],
)
def test_a_batch_is_described_by_its_shape_and_range(ids, text):
    assert guard().check(ids).describe() == text


# Device-side asserts

ASSERTED = RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be reported later")


def explained(error=ASSERTED, **changes):
    return explain_device_assert(
        error, **{"role": "critic", "step": 12, "seed": 7, "batch": "ids 5 to 151908", **changes}
    )


@pytest.mark.parametrize(
    "part", ["critic", "step 12", "ids 5 to 151908", "CUDA_LAUNCH_BLOCKING=1 python -m", "data.seed=7"]
)
def test_an_assert_is_told_with_role_step_batch_and_the_line_to_type(part):
    assert part in explained()


def test_an_assert_is_found_behind_the_error_that_hides_it():
    outer = ValueError("worker died")
    outer.__cause__ = KeyError("key")
    outer.__cause__.__context__ = ASSERTED
    assert explained(outer) is not None


def test_rocms_form_is_known_too():
    assert explained(RuntimeError("HIP error: hipErrorAssert")) is not None


def test_another_error_is_not_explained():
    assert explained(RuntimeError("CUDA out of memory")) is None


def test_what_is_not_known_is_left_out():
    text = explained(step=None, seed=None, batch=None)
    assert "None" not in text
    assert "data.seed" not in text
