"""Bytes whose right value is known from where they belong."""

from __future__ import annotations

import collections
import dataclasses

import torch

from moe_comm.resharding.nvshmem_copy_service.logger import PELogger

__all__ = [
    "PATTERNS",
    "ValidationResult",
    "ValidationSummary",
    "generate_deterministic_data",
    "generate_mixed_data",
    "log_validation_summary",
    "validate_received_data",
]

PATTERNS = ("linear", "mixed")


@dataclasses.dataclass
class ValidationResult:
    """Result of comparing the bytes of one task with what they should be.

    Args:
        task_id: Id of the task.
        size: Bytes compared.
        passed: Whether all are right.
        src_pe: PE that sent them, -1 where not said.
        mismatches: Wrong bytes.
        first_mismatch_idx: Index of the first wrong byte, -1 for none.
        first_mismatch_expected: Value that it should have.
        first_mismatch_actual: Value that it has.
        batch_index: Batch that brought them, -1 where not said.
        iteration: Iteration that brought them, -1 where not said.
    """

    task_id: int
    size: int
    passed: bool
    src_pe: int = -1
    mismatches: int = 0
    first_mismatch_idx: int = -1
    first_mismatch_expected: int = 0
    first_mismatch_actual: int = 0
    batch_index: int = -1
    iteration: int = -1


@dataclasses.dataclass
class ValidationSummary:
    """Results of many tasks."""

    total_tasks: int
    passed_tasks: int
    failed_tasks: int
    total_bytes: int
    results: list[ValidationResult]

    @property
    def all_passed(self) -> bool:
        """Return whether no task failed."""
        return self.failed_tasks == 0


def _device_for(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(device)


def generate_deterministic_data(
    task_id: int, size: int, device: str | torch.device | None = None
) -> torch.Tensor:
    """`size` bytes of which byte p is `(task_id * 31 + p) % 256`.

    Repeats every 256 bytes, and every 256 task ids: bytes that are displaced by a multiple of that
    look right. `generate_mixed_data` has no such period.

    Args:
        task_id: Id of the task.
        size: Bytes.
        device: Device of the bytes; None for CUDA where there is a device, else the CPU.
    """
    positions = torch.arange(size, dtype=torch.int64, device=_device_for(device))
    return ((task_id * 31 % 256 + positions) % 256).to(torch.uint8)


def generate_mixed_data(
    task_id: int, size: int, device: str | torch.device | None = None
) -> torch.Tensor:
    """`size` bytes that tell every task and every position from every other.

    Every 8 bytes are a 64-bit mix (SplitMix64) of the task and the place, so that a piece of 8
    bytes or more that is displaced, or of another task, does not look right by chance.
    """
    words = torch.arange(-(-size // 8), dtype=torch.int64, device=_device_for(device))
    seed = _mix(torch.tensor([task_id & (1 << 63) - 1], dtype=torch.int64))
    return _mix(words + seed.to(words.device)).view(torch.uint8)[:size]


def _signed(value: int) -> int:
    """An unsigned 64-bit constant as the int64 of the same bits."""
    return value - (1 << 64) if value >> 63 else value


def _mix(words: torch.Tensor) -> torch.Tensor:
    """The finaliser of SplitMix64; multiplication wraps, shifts bring in zeros."""
    words = words + _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        words = (words ^ (words >> shift & (1 << 64 - shift) - 1)) * _signed(factor)
    return words


def validate_received_data(
    task_id: int,
    tensor: torch.Tensor,
    size: int,
    src_pe: int = -1,
    *,
    pattern: str = "linear",
) -> ValidationResult:
    """Compare the first `size` bytes of `tensor` with what the task should bring.

    Args:
        task_id: Id of the task.
        tensor: uint8, one dimension, at least `size` long.
        size: Bytes to compare.
        src_pe: PE that is noted in the result.
        pattern: "linear" for `generate_deterministic_data`, "mixed" for `generate_mixed_data`.

    Raises:
        ValueError: `tensor` is shorter than `size`, or `pattern` is unknown.
    """
    if pattern not in PATTERNS:
        raise ValueError(f"pattern must be one of {PATTERNS}, got {pattern!r}")
    if tensor.numel() < size:
        raise ValueError(f"task {task_id}: {size} bytes to compare, got {tensor.numel()}")
    generate = generate_mixed_data if pattern == "mixed" else generate_deterministic_data
    received = tensor[:size]
    expected = generate(task_id, size, device=received.device)
    wrong = (received != expected).nonzero().flatten()
    result = ValidationResult(task_id, size, passed=wrong.numel() == 0, src_pe=src_pe)
    if not result.passed:
        first = int(wrong[0])
        result.mismatches = wrong.numel()
        result.first_mismatch_idx = first
        result.first_mismatch_expected = int(expected[first])
        result.first_mismatch_actual = int(received[first])
    return result


def log_validation_summary(summary: ValidationSummary) -> None:
    """Log it: one line when all passed, else the failed tasks of every sender."""
    if summary.all_passed:
        PELogger.info("all %d tasks are right, %d bytes", summary.total_tasks, summary.total_bytes)
        return
    PELogger.error("%d of %d tasks are wrong", summary.failed_tasks, summary.total_tasks)
    failed: dict[int, list[ValidationResult]] = collections.defaultdict(list)
    for result in summary.results:
        if not result.passed:
            failed[result.src_pe].append(result)
    for src_pe, results in sorted(failed.items()):
        shown = ", ".join(
            f"{result.task_id} (byte {result.first_mismatch_idx}: expected "
            f"{result.first_mismatch_expected}, got {result.first_mismatch_actual})"
            for result in results[:15]
        )
        PELogger.error("  from PE %d, %d tasks: %s", src_pe, len(results), shown)
