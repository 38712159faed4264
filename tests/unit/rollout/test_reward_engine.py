import threading

import pytest

from verl_ext_sharding.rollout.reward_engine import ScoringEngine, ScoringLimits, plan_batches
from verl_ext_sharding.rollout.reward_requests import RewardRequestError

WIDE = ScoringLimits(max_num_seqs=4, max_num_batched_tokens=100)


@pytest.mark.parametrize(
    ("lengths", "limits", "batches"),
    [
        ([], WIDE, []),
        ([5, 9, 7], WIDE, [[1, 2, 0]]),
        ([1, 1, 1, 1, 1], WIDE, [[0, 1, 2, 3], [4]]),
        ([50, 50, 50], WIDE, [[0, 1], [2]]),
        ([40, 60, 10], WIDE, [[1], [0, 2]]),  # 2 x 60 is more than 100, padding included
        ([300, 2], WIDE, [[0], [1]]),
        ([3, 3, 2], ScoringLimits(max_num_seqs=1, max_num_batched_tokens=100), [[0], [1], [2]]),
        ([3, 2, 3], ScoringLimits(max_num_seqs=4, max_num_batched_tokens=100, equal_lengths=True), [[0, 2], [1]]),
    ],
)
def test_batches_hold_like_lengths_within_both_limits(lengths, limits, batches):
    assert plan_batches(lengths, limits) == batches


class Scorer:
    """Scores a sequence with its sum; holds its first pass until `release`."""

    def __init__(self, *, hold=False):
        self.batches = []
        self._reached, self._released = threading.Event(), threading.Event()
        if not hold:
            self._released.set()

    def __call__(self, batch):
        self.batches.append([list(ids) for ids in batch])
        self._reached.set()
        assert self._released.wait(30)
        if any(-1 in ids for ids in batch):
            raise ValueError("a poisoned sequence")
        return [[float(sum(ids))] for ids in batch]

    def wait(self):
        assert self._reached.wait(30)

    def release(self):
        self._released.set()


def submit(engine, ids):
    """Queues one sequence."""
    (future,) = engine.submit([ids])
    return future


@pytest.fixture
def engine_of():
    engines = []

    def make(scorer, limits=WIDE, **options):
        engines.append(ScoringEngine(scorer, limits, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def test_what_arrives_while_the_model_works_is_scored_together(engine_of):
    scorer = Scorer(hold=True)
    engine = engine_of(scorer)
    first = submit(engine, [1])
    scorer.wait()
    others = [submit(engine, ids) for ids in ([2, 2], [3, 3, 3], [4])]
    scorer.release()
    assert [future.result(30) for future in (first, *others)] == [[1.0], [4.0], [9.0], [4.0]]
    assert scorer.batches == [[[1]], [[3, 3, 3], [2, 2], [4]]]


def test_the_sequences_of_one_request_are_scored_together(engine_of):
    scorer = Scorer()
    futures = engine_of(scorer).submit([[1], [2, 2], [3]])
    assert [future.result(30) for future in futures] == [[1.0], [4.0], [3.0]]
    assert scorer.batches == [[[2, 2], [1], [3]]]


def test_a_longer_late_comer_does_not_overtake_what_was_there_before(engine_of):
    scorer, late = Scorer(hold=True), []

    def score(batch):
        if batch == [[2, 2]]:
            late.append(submit(engine, [3, 3, 3]))
        return scorer(batch)

    engine = engine_of(score, ScoringLimits(max_num_seqs=1, max_num_batched_tokens=100))
    futures = [submit(engine, [0])]
    scorer.wait()
    futures += [submit(engine, [1]), submit(engine, [2, 2])]
    scorer.release()
    assert [future.result(30) for future in futures] == [[0.0], [1.0], [4.0]]
    assert late[0].result(30) == [9.0]
    assert scorer.batches == [[[0]], [[2, 2]], [[1]], [[3, 3, 3]]]


def test_late_comers_of_several_passes_are_scored_together(engine_of):
    scorer, late = Scorer(hold=True), []

    def score(batch):
        if len(batch[0]) == 3:
            late.append(submit(engine, [len(late) + 5]))
        return scorer(batch)

    engine = engine_of(score, ScoringLimits(max_num_seqs=4, max_num_batched_tokens=4))
    submit(engine, [0])
    scorer.wait()
    long = [submit(engine, [number] * 3) for number in (1, 2)]
    scorer.release()
    assert [future.result(30) for future in long] == [[3.0], [6.0]]
    assert [future.result(30) for future in late] == [[5.0], [6.0]]
    assert scorer.batches[-1] == [[5], [6]]


def test_a_call_runs_between_two_passes(engine_of):
    scorer = Scorer(hold=True)
    engine = engine_of(scorer, ScoringLimits(max_num_seqs=1, max_num_batched_tokens=100))
    futures = [submit(engine, [number]) for number in range(3)]
    scorer.wait()
    passes = engine.call(lambda: len(scorer.batches))
    scorer.release()
    assert passes.result(30) == 1
    assert [future.result(30) for future in futures] == [[0.0], [1.0], [2.0]]


def test_a_sequence_that_fails_takes_no_other_with_it(engine_of):
    recovered = []
    scorer = Scorer(hold=True)
    engine = engine_of(scorer, recover=lambda: recovered.append(True))
    submit(engine, [0])
    scorer.wait()
    fine, poisoned = submit(engine, [1, 2]), submit(engine, [-1])
    scorer.release()
    assert fine.result(30) == [3.0]
    with pytest.raises(RewardRequestError, match="1 tokens: ValueError: a poisoned sequence") as error:
        poisoned.result(30)
    assert error.value.status == 500
    assert len(recovered) == 2  # after the batch, and after the sequence alone
    assert submit(engine, [5]).result(30) == [5.0]


def test_an_aborted_sequence_is_never_scored(engine_of):
    scorer = Scorer(hold=True)
    engine = engine_of(scorer)
    running = submit(engine, [1])
    scorer.wait()
    waiting = submit(engine, [2])
    assert engine.abort() == 1
    scorer.release()
    assert running.result(30) == [1.0]
    with pytest.raises(RewardRequestError, match="aborted"):
        waiting.result(30)
    assert submit(engine, [3]).result(30) == [3.0]
    assert [[2]] not in scorer.batches


def test_a_sequence_whose_caller_has_gone_is_never_scored(engine_of):
    scorer = Scorer(hold=True)
    engine = engine_of(scorer)
    submit(engine, [1])
    scorer.wait()
    assert submit(engine, [2]).cancel()
    scorer.release()
    assert submit(engine, [3]).result(30) == [3.0]
    assert [2] not in [ids for batch in scorer.batches for ids in batch]


def test_a_device_that_can_not_even_be_freed_fails_its_sequences_and_leaves_none_waiting(engine_of):
    def broken():
        raise RuntimeError("CUDA error: device-side assert triggered")

    engine = engine_of(Scorer(), recover=broken)
    for future in (*engine.submit([[-1], [-1, -1]]), submit(engine, [-1])):
        with pytest.raises(RewardRequestError, match="a poisoned sequence"):
            future.result(10)
    assert submit(engine, [5]).result(10) == [5.0]
