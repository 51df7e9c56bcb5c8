"""`moe-comm bench`: a case is checked against the definition, then timed between two roofs.

`case` says what is measured, `run` and `sweep` in which order, and `worker` and `sweep_worker` do it on one
rank, for a `side`: our calls (`measured_calls`) or one of `peers`. `oracle` checks, `roof` and `traffic` say what
could be, `result` is what is written, and `report`, `tables`, `picture` show it. Weights have `reshard`.
"""
