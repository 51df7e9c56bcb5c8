"""Plan of the transfers: the rank that sends, the piece of a parameter, and the rank that receives.

`planner` makes plans of what ranks say (`rank_metadata`), by `assignment` for each parameter, and makes
few copies of many by `joined_pieces`, and parts of a plan by `batches`; `tp_planning` has what Megatron's planner does besides. `reshard_plan`, `transfer_op` and `transform_protocol` are what a
plan consists of, `plan_check` says whether it is sound. Nothing moves here.

Knows: describe.
"""
