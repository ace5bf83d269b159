"""The ledger's operations by example; whole lives are the scheduler's tests."""

from __future__ import annotations

import pytest

from service.engine.batch import KVCopy, KVDrop, KVFree, KVOperation, KVRestore, KVRetain, KVSave
from service.engine.chunks import ChunkRules
from service.engine.kv.ledger import KVLedger
from service.engine.kv.reservations import KVBudget
from service.engine.sampling.beam import BeamSearch
from service.engine.sequence import Sequence, SequenceGroup
from service.engine.types import BeamSearchParams, SamplingParams
from tests.fakes import request

CHUNK = 4


def make_ledger(num_bytes: int = 1000, num_slots: int = 4) -> KVLedger:
    """A byte holds a token."""
    rules = ChunkRules(chunk=CHUNK, context=64, prompt_padding=4, short_prompt=0, source_padding=4, source_context=64)
    ledger = KVLedger(num_slots, KVBudget(num_bytes=num_bytes), rules)
    assert ledger.take_operations() == (KVRetain(frozenset()),)
    return ledger


def make_group(
    prompt: list[int], *, max_tokens: int = 8, num_outputs: int = 1, beam_size: int | None = None, order: int = 0
) -> SequenceGroup:
    search = None if beam_size is None else BeamSearchParams(beam_size=beam_size)
    one = request(f"r{order}", prompt, sampling=SamplingParams(n=num_outputs), beam_search=search)
    group = SequenceGroup(
        request=one,
        order=order,
        due=0.0,
        source_token_ids=(),
        prompt_token_ids=tuple(prompt),
        max_num_tokens=len(prompt) + max_tokens,
        eos_ids=frozenset(),
        is_forked=num_outputs == 1,
        beams=None if search is None else BeamSearch(search, max_tokens, frozenset(), frozenset()),
    )
    group.sequences = [
        Sequence(group=group, index=index, token_ids=list(prompt), seed=0, text=None, rules=None)
        for index in range(num_outputs)
    ]
    return group


def compute(ledger: KVLedger, group: SequenceGroup) -> None:
    """All of a prompt, chunk by chunk."""
    leader = group.sequences[0]
    slot = ledger.slots.slot_of(leader)
    for start in range(leader.num_computed_tokens, leader.num_tokens, CHUNK):
        count = min(CHUNK, leader.num_tokens - start)
        leader.num_computed_tokens += count
        ledger.cache_chunks(slot, start, start + count)


def admit(ledger: KVLedger, group: SequenceGroup) -> list[int]:
    assert ledger.fits(group)
    return ledger.admit(group)


def operations(ledger: KVLedger) -> tuple[KVOperation, ...]:
    """All of them, those that can wait included."""
    ledger.check_invariants()
    taken: list[KVOperation] = []
    while some := ledger.take_operations():
        taken += some
    return tuple(taken)


def test_ledger_forked_outputs_get_copies_of_their_row() -> None:
    ledger, group = make_ledger(), make_group([5, 6, 7], num_outputs=3)
    assert admit(ledger, group) == [0]
    compute(ledger, group)
    group.is_forked = True
    ledger.fork(group.sequences[0], group.sequences)
    assert operations(ledger) == (KVCopy(0, 1, 3, 0), KVCopy(0, 2, 3, 0))
    assert list(ledger.slots) == group.sequences


def test_ledger_an_output_that_ends_at_once_leaves_its_row_to_the_next() -> None:
    ledger, group = make_ledger(), make_group([5, 6, 7], num_outputs=3)
    admit(ledger, group)
    compute(ledger, group)
    leader, *heirs = group.sequences
    group.sequences, group.is_forked = heirs, True
    ledger.fork(leader, heirs)
    ledger.release([group])
    assert operations(ledger) == (KVCopy(0, 1, 3, 0),)
    assert list(ledger.slots) == heirs


def test_ledger_a_beam_takes_the_row_of_a_dead_one_and_copies_what_they_do_not_share() -> None:
    ledger, group = make_ledger(), make_group([5, 6, 7], beam_size=2)
    admit(ledger, group)
    compute(ledger, group)
    (first,) = group.sequences
    second = first.fork()
    ledger.rearrange([(second, first)], [])
    group.sequences = [first, second]
    assert operations(ledger) == (KVCopy(0, 1, 3, 0),)
    for beam, token_ids in ((first, (8, 9)), (second, (8, 10))):
        beam.token_ids += token_ids
        beam.num_computed_tokens += 2
    child = second.fork()
    ledger.rearrange([(child, second)], [first])
    group.sequences = [second, child]
    assert operations(ledger) == (KVCopy(1, 0, 5, 0, start=4),)
    assert list(ledger.slots) == [child, second]


def test_ledger_saves_preempted_rows_before_others_move_and_restores_them_in_any_row() -> None:
    ledger = make_ledger()
    victim, other = make_group([5, 6], order=0), make_group([7, 8, 9], order=1)
    for group in (victim, other):
        admit(ledger, group)
        compute(ledger, group)
    ledger.preempt(victim)
    assert operations(ledger) == (KVSave(0, 1, 2, 0), KVCopy(1, 0, 3, 0))
    assert ledger.num_cached_tokens(victim) == 0
    assert admit(ledger, victim) == [1]
    assert operations(ledger) == (KVRestore(1, 1), KVDrop(1))
    assert (victim.handles, victim.sequences[0].num_computed_tokens) == ((), 2)


def test_ledger_caches_whole_chunks_for_requests_with_the_same_prefix() -> None:
    ledger, first = make_ledger(), make_group([*range(10)])
    admit(ledger, first)
    compute(ledger, first)
    assert operations(ledger) == (KVSave(0, 1, 4, 0, 0), KVSave(0, 2, 8, 0, 4))
    again = make_group([*range(8)], order=1)
    # Of the second chunk the last logits are wanted.
    assert ledger.num_cached_tokens(again) == CHUNK
    admit(ledger, again)
    assert operations(ledger) == (KVRestore(1, 1),)
    assert again.sequences[0].num_computed_tokens == again.num_cached_tokens == CHUNK


def test_ledger_copies_to_the_cache_wait_until_their_row_is_written_anew() -> None:
    ledger, group = make_ledger(), make_group([*range(21)])
    admit(ledger, group)
    compute(ledger, group)
    saves = [KVSave(0, chunk, CHUNK * chunk, 0, CHUNK * (chunk - 1)) for chunk in range(1, 6)]
    assert ledger.take_operations() == (saves[0],)
    other = make_group([50, 51], order=1)
    assert admit(ledger, other) == [1]
    assert ledger.take_operations() == (saves[1],)
    group.sequences = []
    other.sequences = []
    ledger.release([group, other])
    assert ledger.take_operations() == (saves[2],)
    assert admit(ledger, make_group([52, 53], max_tokens=40, order=2)) == [0]
    assert ledger.take_operations() == (*saves[3:],)
    assert not ledger.take_operations()


def test_ledger_copies_to_the_cache_wait_behind_few_others_and_before_all_else() -> None:
    ledger, group = make_ledger(), make_group([*range(49)])
    admit(ledger, group)
    compute(ledger, group)
    assert [operation.handle for operation in ledger.take_operations() if isinstance(operation, KVSave)] == [1, 2, 3, 4]
    assert admit(ledger, make_group([*range(5)], order=1)) == [1]
    taken = ledger.take_operations()
    assert [type(operation) for operation in taken] == [*[KVSave] * 8, KVRestore]


def test_ledger_a_full_caches_copies_wait_with_the_chunks_whose_memory_they_take() -> None:
    ledger = make_ledger(48)
    for number in range(2):
        group = make_group([10 * number + each for each in range(17)], max_tokens=4, order=number)
        admit(ledger, group)
        compute(ledger, group)
        group.sequences = []
        ledger.release([group])
        if not number:
            operations(ledger)
    taken = [ledger.take_operations() for _ in range(3)]
    assert [[type(operation) for operation in each] for each in taken] == [[KVSave], [KVSave], [KVDrop, KVSave]]


def test_ledger_memory_that_another_needs_is_freed_at_once() -> None:
    ledger, group = make_ledger(), make_group([*range(17)], max_tokens=4)
    admit(ledger, group)
    compute(ledger, group)
    assert ledger.take_operations() == (KVSave(0, 1, 4, 0, 0),)
    assert ledger.take_operations() == (KVSave(0, 2, 8, 0, 4),)
    ledger.set_limit(21)
    # The copies that have waited are not made at all.
    assert ledger.take_operations() == (KVDrop(2), KVDrop(1))


def test_ledger_a_chunk_whose_room_is_its_parents_frees_that_at_once() -> None:
    ledger, group = make_ledger(16 + 2 * CHUNK), make_group([*range(14)], max_tokens=2)
    admit(ledger, group)
    leader = group.sequences[0]
    for start in range(0, 12, CHUNK):
        leader.num_computed_tokens += CHUNK
        ledger.cache_chunks(0, start, start + CHUNK)
        if start < 8:
            assert [type(operation) for operation in ledger.take_operations()] == [KVSave]
    assert ledger.take_operations() == (KVDrop(2),)


def test_ledger_a_large_source_is_dropped_at_once_where_a_small_one_takes_its_place() -> None:
    ledger = make_ledger(88)
    sources = [(5,) * 40, (6,) * 4, (7,) * 4]
    groups = [make_group([1], max_tokens=most, order=number) for number, most in enumerate((3, 29, 3))]
    for group, source in zip(groups, sources, strict=True):
        group.source_token_ids = source
    admit(ledger, groups[0])
    ledger.cache_source(0)
    groups[0].sequences = []
    ledger.release(groups[:1])
    operations(ledger)
    for slot, group in enumerate(groups[1:]):
        admit(ledger, group)
        ledger.cache_source(slot)
    assert KVDrop(1) in ledger.take_operations()


@pytest.mark.parametrize(("num_bytes", "dropped"), [(40, []), (31, [2]), (27, [2, 1])])
def test_ledger_evicts_chunks_from_a_prompts_end_until_a_request_fits(num_bytes: int, dropped: list[int]) -> None:
    ledger, first = make_ledger(num_bytes), make_group([*range(10)])
    admit(ledger, first)
    compute(ledger, first)
    first.sequences = []
    ledger.release([first])
    operations(ledger)
    admit(ledger, make_group([50], max_tokens=23, order=1))

    assert operations(ledger) == tuple(map(KVDrop, dropped))
    assert ledger.num_cached_bytes == 2 * CHUNK - CHUNK * len(dropped)


def test_ledger_frees_unused_rows_before_it_evicts_chunks() -> None:
    ledger = make_ledger(40)
    groups = [make_group([number, 5, 6, 7, 8], max_tokens=5, order=number) for number in range(2)]
    for group in groups:
        admit(ledger, group)
        compute(ledger, group)
        group.sequences = []
    ledger.release(groups)
    operations(ledger)
    # Beside its reservation there is room for the two cached chunks, not for what is left in the second row.
    admit(ledger, make_group([50], max_tokens=31, order=2))
    assert operations(ledger) == (KVFree(1),)
    assert ledger.num_cached_bytes == 2 * CHUNK


def test_ledger_a_shorter_owner_keeps_the_memory_under_what_it_may_write() -> None:
    ledger, first = make_ledger(), make_group([3, 4, 5, 6, 7])
    admit(ledger, first)
    compute(ledger, first)
    first.sequences = []
    ledger.release([first])
    operations(ledger)
    admit(ledger, make_group([50], max_tokens=2, order=1))
    assert operations(ledger) == (KVFree(0, 3),)


def test_ledger_caches_what_follows_a_hit_below_it() -> None:
    ledger = make_ledger()
    prompts = ([*range(10)], [0, 1, 2, 3, 60, 61, 62, 63, 64])
    for order, prompt in enumerate(prompts):
        group = make_group(prompt, order=order)
        admit(ledger, group)
        compute(ledger, group)
    for order, prompt in enumerate(prompts, 2):
        assert ledger.num_cached_tokens(make_group(prompt, order=order)) == 2 * CHUNK


def test_ledger_caches_no_chunk_without_its_predecessors() -> None:
    ledger = make_ledger(18 + 10)
    long, short = make_group([*range(10)], order=0), make_group([50, 51], order=1)
    for group in (long, short):
        admit(ledger, group)
    (leader,) = long.sequences
    leader.num_computed_tokens = CHUNK
    ledger.cache_chunks(0, 0, CHUNK)
    assert ledger.num_cached_bytes == 0
    short.sequences[0].num_computed_tokens = 2
    short.sequences = []
    ledger.release([short])
    leader.num_computed_tokens += CHUNK
    ledger.cache_chunks(0, CHUNK, 2 * CHUNK)
    assert ledger.num_cached_bytes == 0


def test_ledger_no_more_than_one_row_of_a_preempted_request_lies_in_memory_twice() -> None:
    ledger = make_ledger(num_bytes=4 * 40)
    group = make_group([5] * 32, max_tokens=8, num_outputs=4)
    ledger.admit(group)
    compute(ledger, group)
    group.is_forked = True
    ledger.fork(group.sequences[0], group.sequences)
    for sequence in group.sequences:
        sequence.token_ids += [7] * 7
        sequence.num_computed_tokens = 38
    operations(ledger)
    held, saved, most = dict.fromkeys(range(4), 39), 0, 0
    ledger.preempt(group)
    for operation in operations(ledger):
        if isinstance(operation, KVSave):
            saved += operation.num_tokens
        elif isinstance(operation, KVFree):
            held[operation.slot] = operation.num_tokens
        most = max(most, saved + sum(held.values()))
    assert most <= ledger.limit + 38
    ledger.check_invariants()
