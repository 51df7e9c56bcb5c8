"""Faults of the CPU backend that a checked build can switch on, and which scenarios show them.

`tests/cpp/test_schedules.py` holds the schedules to them; docs/checked_protocol.md explains.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HostMutant:
    """One `MOE_MUTANT(name)` of core/, layout/, heap/ or host/.

    Attributes:
        name: As the source spells it.
        file: Where it is, relative to csrc.
        breaks: The rule that it breaks.
        scenarios: Any of them finds it, tried in this order.
        kinds: What is found.
    """

    name: str
    file: str
    breaks: str
    scenarios: tuple[str, ...]
    kinds: frozenset[str]


def _mutant(name: str, file: str, breaks: str, scenarios: str, kinds: str) -> HostMutant:
    return HostMutant(name, file, breaks, tuple(scenarios.split()), frozenset(kinds.split()))


_ANY = "host_dispatches host_layer"
_ABORT = "host_abort host_interrupt host_death"
_UNSAFE = "race bounds uninitialised result"

HOST_MUTANTS: tuple[HostMutant, ...] = (
    # Waiting and waking.
    _mutant(
        "no_fence_before_wake",
        "core/sync.h",
        "a waker's flag is stored before it looks for sleepers",
        _ANY,
        "deadlock",
    ),
    _mutant(
        "no_fence_before_sleep",
        "core/sync.h",
        "a sleeper enrols before it looks at its flag once more",
        "host_interrupt host_dispatches",
        "deadlock",
    ),
    _mutant(
        "sleep_without_second_look",
        "core/sync.h",
        "an enrolled sleeper looks at its flag once more",
        "host_layer host_interrupt",
        "deadlock bounds",
    ),
    _mutant(
        "ring_not_counted",
        "core/sync.h",
        "a ring changes the word that sleepers compare",
        "host_layer host_interrupt",
        "deadlock",
    ),
    _mutant(
        "waiter_not_counted", "core/sync.h", "sleepers are counted for wakers", _ANY, "deadlock"
    ),
    _mutant(
        "abort_looked_at_before_enrolment",
        "host/wait.h",
        "a sleeper hears of aborts and closed buffers, not only of its flag",
        "host_closed host_abort_combine",
        "deadlock",
    ),
    _mutant("no_ring_after_row", "host/exchange.cpp", "a row wakes its reader", _ANY, "deadlock"),
    _mutant(
        "no_ring_after_done",
        "host/exchange.cpp",
        "a done flag wakes its reader",
        "host_layer",
        "deadlock",
    ),
    # Rows and second offers.
    _mutant(
        "row_flag_before_body",
        "host/exchange.cpp",
        "the flag of a row is stored after its body",
        _ANY,
        _UNSAFE,
    ),
    _mutant(
        "row_flag_relaxed", "host/exchange.cpp", "the flag of a row is released", _ANY, _UNSAFE
    ),
    _mutant(
        "row_wait_relaxed",
        "host/exchange_waits.cpp",
        "the flag of a row is acquired",
        _ANY,
        _UNSAFE,
    ),
    _mutant(
        "second_offer_flag_before_body",
        "host/exchange.cpp",
        "the flag of a second offer is stored after its body",
        _ANY,
        _UNSAFE,
    ),
    _mutant(
        "second_offer_flag_relaxed",
        "host/exchange.cpp",
        "the flag of a second offer is released",
        _ANY,
        _UNSAFE,
    ),
    _mutant(
        "no_wait_for_second_offers",
        "host/exchange.cpp",
        "senders wait for the second offers of ranks that were short",
        _ANY,
        _UNSAFE,
    ),
    _mutant(
        "matrix_read_after_done",
        "host/dispatch.cpp",
        "the count matrix is read before the done flags are released",
        "host_layer host_dispatches",
        _UNSAFE,
    ),
    # Epochs.
    _mutant(
        "no_reuse_wait",
        "host/exchange.cpp",
        "an entry of the ring is written again once every peer is done with it",
        "host_layer host_dispatches",
        _UNSAFE,
    ),
    _mutant(
        "reuse_wait_of_wrong_epoch",
        "host/exchange.cpp",
        "the reuse wait is for the epoch that the entry held",
        "host_layer host_dispatches",
        _UNSAFE,
    ),
    _mutant(
        "wrong_ring_entry",
        "layout/workspace.h",
        "epochs take the entries of the ring in turn",
        _ANY,
        _UNSAFE,
    ),
    _mutant(
        "done_of_former_epoch",
        "host/exchange.cpp",
        "a done flag carries the epoch that is done",
        _ANY,
        "deadlock",
    ),
    # Data of dispatch.
    _mutant(
        "done_before_rows",
        "host/dispatch.cpp",
        "a sender is done after it has written its rows",
        _ANY,
        _UNSAFE,
    ),
    _mutant("done_flag_relaxed", "host/exchange.cpp", "the done flag is released", _ANY, _UNSAFE),
    _mutant(
        "flag_wait_relaxed", "host/exchange_waits.cpp", "the done flag is acquired", _ANY, _UNSAFE
    ),
    _mutant(
        "no_wait_for_senders",
        "host/dispatch.cpp",
        "a receiver waits for every rank that sends to it",
        _ANY,
        _UNSAFE,
    ),
    _mutant(
        "no_store_fence_before_done",
        "host/row_writer.cpp",
        "stores past the caches are fenced by the thread that made them",
        _ANY,
        "race",
    ),
    _mutant(
        "slot_one_too_low",
        "layout/routing.cpp",
        "rows of an expert begin behind those of lower ranks",
        _ANY,
        _UNSAFE,
    ),
    _mutant(
        "padding_not_zeroed",
        "host/dispatch.cpp",
        "the receiver zeroes what no sender writes",
        _ANY,
        "uninitialised result",
    ),
    # Data of combine.
    _mutant(
        "done_before_rows_are_read",
        "host/combine.cpp",
        "a puller is done after it has read its rows",
        _ANY,
        _UNSAFE,
    ),
    _mutant(
        "no_wait_for_pullers",
        "host/combine.cpp",
        "combine returns when nobody reads its rows any more",
        _ANY,
        _UNSAFE,
    ),
    _mutant(
        "rows_given_back_early",
        "host/combine.cpp",
        "rows that were copied in stay until nobody reads them",
        _ANY,
        _UNSAFE,
    ),
    _mutant(
        "no_store_fence_after_copying_in",
        "host/combine.cpp",
        "copying in past the caches ends with a fence",
        _ANY,
        "race",
    ),
    # Failure.
    _mutant(
        "abort_not_polled",
        "host/exchange_waits.cpp",
        "every wait looks at the abort word",
        _ABORT,
        "deadlock",
    ),
    _mutant(
        "abort_set_before_record",
        "host/group.cpp",
        "an abort is set after its record was written",
        _ABORT,
        _UNSAFE,
    ),
    _mutant("abort_set_relaxed", "host/group.cpp", "an abort is released", _ABORT, _UNSAFE),
    _mutant(
        "abort_not_spread",
        "host/group.cpp",
        "whoever ends by an abort tells all peers before its rows may change",
        "host_abort_combine",
        "race bounds",
    ),
    _mutant(
        "no_quarantine_after_abort",
        "host/exchange.cpp",
        "windows of an aborted operation are set aside",
        _ABORT,
        "bounds race",
    ),
    _mutant(
        "resume_at_wrong_epoch",
        "host/group_recovery.cpp",
        "buffers go on behind every epoch that any rank has begun",
        _ABORT,
        "result race deadlock",
    ),
    _mutant(
        "closed_not_looked_at",
        "host/exchange.cpp",
        "a rank that waits for a buffer's peer sees that the peer destroyed it",
        "host_closed",
        "deadlock",
    ),
    _mutant(
        "control_area_freed_early",
        "host/group.cpp",
        "a control area serves something else once no peer can write there",
        "host_closed",
        "race bounds",
    ),
    # Windows.
    _mutant(
        "window_freed_without_lock",
        "heap/heap_core.h",
        "the list of windows changes under its lock",
        "host_windows",
        "race",
    ),
    _mutant(
        "windows_overlap",
        "heap/window_allocator.cpp",
        "the upper part of a block begins where the lower ends",
        "host_windows",
        "bounds result race",
    ),
    _mutant(
        "quarantine_forgotten",
        "heap/window_allocator.cpp",
        "a window in quarantine is not handed out",
        "host_windows",
        "bounds",
    ),
    _mutant(
        "tail_leaves_quarantine",
        "heap/window_allocator.cpp",
        "the tail of a window in quarantine stays there too",
        "host_windows",
        "bounds",
    ),
    # Batched copy.
    _mutant(
        "copy_row_flag_before_body",
        "host/copy_run.cpp",
        "the flag of a batched copy's row is stored after its body",
        "host_copy",
        _UNSAFE,
    ),
    _mutant(
        "no_wait_for_verdicts",
        "host/copy_run.cpp",
        "data moves once every rank has found nothing wrong",
        "host_copy",
        _UNSAFE,
    ),
    _mutant(
        "slot_flag_before_bytes",
        "host/copy_move.cpp",
        "a slot is filled, or emptied, before that is said",
        "host_copy",
        _UNSAFE,
    ),
    _mutant(
        "slot_filled_early",
        "host/copy_move.cpp",
        "a slot is filled again once it is empty",
        "host_copy",
        _UNSAFE,
    ),
    _mutant(
        "no_store_fence_in_copy",
        "host/copy_move.cpp",
        "stores past the caches into a peer's tensor are fenced",
        "host_copy",
        "race",
    ),
    _mutant(
        "no_wait_for_direct_writes",
        "host/copy_move.cpp",
        "a run returns when all that peers write here has landed",
        "host_copy",
        _UNSAFE,
    ),
)
