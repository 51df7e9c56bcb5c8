#!/usr/bin/env bash
# The backward of independent parts of a graph runs in the order of numbers that every thread counts for itself,
# not in the reverse order of the forward. Linux, Python 3.11, one process.
#
# One would guess that what was made last comes first, whoever made it: so it is where one thread made all.
#
#   torch 2.13.0: y = a(x) of the main thread, then z = b(x) of another one, which has ended; (y + z).backward():
#       where the main thread has recorded more operations before, b, which came last, is the last to go back;
#       where the other one has, it is the first.
#
# So collectives whose forwards were issued by several threads have backwards in an order that depends on what
# else these threads did, and may differ between ranks. Ends with 1 where that has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}

"$python" -m pip install --quiet --disable-pip-version-check --target "$folder" torch==2.13.0 numpy==2.4.6
cat >"$folder/threads.py" <<'PYTHON'
import threading

import torch

order = []


class Named(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, name):
        ctx.name = name
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        order.append(ctx.name)
        return grad, None


def forward(x, name, num_before, into):
    for _ in range(num_before):
        x.clone()
    into[name] = Named.apply(x, name)


def backward_order(steps):
    """Names in the order of their backwards; steps are (name, operations before, whether in a new thread)."""
    x, made = torch.ones(1, requires_grad=True), {}
    for name, num_before, is_threaded in steps:
        if is_threaded:
            thread = threading.Thread(target=forward, args=(x, name, num_before, made))
            thread.start()
            thread.join()
        else:
            forward(x, name, num_before, made)
    order.clear()
    sum(made.values()).backward()
    return order.copy()


assert torch.__version__.split("+")[0] == "2.13.0", torch.__version__
assert backward_order([("a", 0, False), ("b", 0, False)]) == ["b", "a"]
assert backward_order([("a", 100, False), ("b", 0, True)]) == ["a", "b"], order
assert backward_order([("a", 0, False), ("b", 10_000, True)]) == ["b", "a"], order
assert backward_order([("a", 10_000, True), ("b", 0, False)]) == ["a", "b"], order
PYTHON
PYTHONPATH="$folder" "$python" "$folder/threads.py"
echo "as described"
