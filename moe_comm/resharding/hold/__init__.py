"""Objects that users hold and call: refits, and what lasts from one refit to the next.

`refit` has the calls, `refit_options` what they say beside models and service, `refit_pass` is one run
of them: `refit_group` and `refit_models` say who takes part with what, `refit_services` and `plan_cache`
keep transports and plans. `refit_world` is refits of several programs, `held_versions` which version an engine then
serves. `verification` proves that a refit landed; `heap_parameters` puts a model
where peers write in place.

Knows: move, copy_services, formats, plan, describe.
"""
