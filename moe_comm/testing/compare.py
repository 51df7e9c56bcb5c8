"""Exact comparison of tensors, and a list of what differed."""

from __future__ import annotations

import dataclasses

import torch


def difference(got: object, want: torch.Tensor | None) -> str | None:
    """Describe how `got` differs from `want` in type, shape or any bit, or return None.

    NaNs are compared with their payload and zeros with their sign.
    """
    if want is None:
        return None if got is None else f"got {type(got).__name__}, want None"
    if not isinstance(got, torch.Tensor):
        return f"got {got!r}, want a tensor"
    if got.dtype != want.dtype or got.shape != want.shape:
        return f"got {got.dtype} {tuple(got.shape)}, want {want.dtype} {tuple(want.shape)}"
    if got.numel() == 0:
        return None
    if torch.equal(_bytes(got), _bytes(want)):
        return None
    got_bytes, want_bytes = (
        _bytes(tensor).view(tensor.numel(), tensor.element_size()) for tensor in (got, want)
    )
    is_different = (got_bytes != want_bytes).any(dim=1)
    first = int(is_different.nonzero()[0])
    place = [int(i) for i in torch.unravel_index(torch.tensor(first), got.shape)]
    values = [
        f"{tensor.flatten()[first].item()!r} (0x{bytes(raw[first].tolist())[::-1].hex()})"
        for tensor, raw in ((got, got_bytes), (want, want_bytes))
    ]
    return (
        f"{int(is_different.sum())} of {got.numel()} elements differ, first at {place}: "
        f"got {values[0]}, want {values[1]}"
    )


def _rows(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    # Bytes, as not every dtype can be indexed.
    row_bytes = tensor.shape[1:].numel() * tensor.element_size()
    raw = _bytes(tensor).view(len(rows), row_bytes)[rows]
    return raw.view(-1).view(tensor.dtype).view(len(raw), *tensor.shape[1:])


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as uint8, elements end to end: the same memory if it lies like that, which is quicker."""
    there = tensor.detach().cpu().resolve_conj().resolve_neg()
    flat = there.reshape(-1) if there.is_contiguous() else flat_copy(there)
    if flat.stride(0) != 1:  # of one element
        flat = flat_copy(flat)
    return flat.view(torch.uint8)


def flat_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Elements end to end."""
    # Not by views: a contiguous tensor of one column may have any stride, which a view refuses.
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach()).view(-1)


@dataclasses.dataclass(frozen=True, eq=False)
class _Pair:
    what: str
    got: object
    want: torch.Tensor | None
    rows: torch.Tensor | None


@dataclasses.dataclass
class Expectations:
    """Pairs of tensors compared when everything is done, so that ranks never part on the way.

    Comparing late also shows memory that a later operation overwrote.
    """

    pairs: list[_Pair] = dataclasses.field(default_factory=list)
    faults: list[str] = dataclasses.field(default_factory=list)

    def equal(
        self,
        what: str,
        got: object,
        want: torch.Tensor | None,
        *,
        rows: torch.Tensor | None = None,
    ) -> None:
        """`got` must have the bits of `want` now and later.

        Args:
            what: Says which tensors these are.
            got: Result of the backend.
            want: Tensor of the definition, or None.
            rows: bool `[M]`: only these rows are compared, and the shape of all.
        """
        pair = _Pair(what, got, want, rows)
        self.pairs.append(pair)
        self._compare(pair)

    def true(self, what: str, condition: bool, detail: object = "") -> None:
        """`condition` must hold."""
        if not condition:
            self.faults.append(f"{what}: {detail}")

    def result(self) -> list[str]:
        """Everything that differed, in the order in which it was seen."""
        if not self.faults:
            for pair in self.pairs:
                self._compare(dataclasses.replace(pair, what=f"{pair.what}, at the end"))
        return self.faults

    def _compare(self, pair: _Pair) -> None:
        got, want = pair.got, pair.want
        if (
            pair.rows is not None
            and want is not None
            and isinstance(got, torch.Tensor)
            and got.shape == want.shape
        ):
            got, want = _rows(got, pair.rows), _rows(want, pair.rows)
        text = difference(got, want)
        if text is not None:
            self.faults.append(f"{pair.what}: {text}")
