"""SGLang's plugin: this package's dispatcher in the place of `DeepEPDispatcher`.

SGLang finds `register` by the entry point `moe_comm` of the group `sglang.srt.plugins`.
"""

from __future__ import annotations

import importlib

from moe_comm import env

_REPLACED = "sglang.srt.layers.moe.token_dispatcher.deepep.DeepEPDispatcher"


def register() -> None:
    """Ask SGLang to put `SglangDispatcher` where it has `DeepEPDispatcher`. Called by SGLang.

    Nothing, unless `SGLANG_PLUGINS` names `moe_comm`: SGLang runs every plugin that is installed where the
    variable is empty, and a package that is there for another reason must not change a server.
    """
    if "moe_comm" not in env.sglang_plugins():
        return
    registry = importlib.import_module("sglang.srt.plugins.hook_registry")
    dispatcher = importlib.import_module("moe_comm.dispatcher.sglang").SglangDispatcher
    registry.HookRegistry.register(_REPLACED, dispatcher, registry.HookType.REPLACE)
