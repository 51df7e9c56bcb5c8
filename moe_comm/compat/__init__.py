"""Other packages' modules, provided by this package under their own names.

    moe_comm.compat.install("deep_ep")
    import deep_ep

| name | what is provided | described in |
|---|---|---|
| deep_ep, and with it deep_ep_cpp | `moe_comm.compat.deep_ep`, `moe_comm.compat.deep_ep_cpp` | docs/deep_ep.md |
| megatron.core.transformer.moe.fused_a2a | `moe_comm.fused_a2a` | docs/megatron.md |
| megatron.core.resharding | `moe_comm.resharding` | docs/megatron.md#resharding |
| etha.comm.ir | `moe_comm.resharding.ir` | docs/resharding.md#tensors-between-device-meshes |

For programs that cannot be edited, `python -m moe_comm.compat` does the same before they begin, with the
names in `MOE_COMM_COMPAT` (`deep_ep`, or several with commas).
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import threading
import types

from moe_comm import env

__all__ = ["install", "install_from_environment", "installed", "uninstall"]

_PROVIDERS = {
    "deep_ep": "moe_comm.compat.deep_ep",
    "megatron.core.transformer.moe.fused_a2a": "moe_comm.fused_a2a",
    "megatron.core.resharding": "moe_comm.resharding",
    "etha.comm.ir": "moe_comm.resharding.ir",
}
# By name: modules that the real package brings beside itself.
_COMPANIONS = {"deep_ep": {"deep_ep_cpp": "moe_comm.compat.deep_ep_cpp"}}
NAMES = tuple(_PROVIDERS)
_lock = threading.Lock()
# By name: what stood in sys.modules before, and what stands there now.
_replaced: dict[str, dict[str, types.ModuleType]] = {}
_provided: dict[str, dict[str, types.ModuleType]] = {}


def install(name: str, *, replace: bool = False) -> None:
    """Make `import <name>` and its submodules resolve to the modules here. Idempotent.

    Local to the process. Names imported earlier from a real package stay what they are. The packages
    above the name need not be there for `from <name> import ...`.

    Args:
        name: One of `NAMES`.
        replace: Also where another module of that name is imported already.

    Raises:
        ValueError: There is no such name, or another module is imported and `replace` is False.
    """
    if name not in NAMES:
        raise ValueError(f"name must be one of {', '.join(NAMES)}, got {name!r}")
    modules = _modules_of(name)
    with _lock:
        if name in _provided:
            return
        before = _imported(name)
        if before and not replace:
            imported, module = next(iter(before.items()))
            file = getattr(module, "__file__", None)
            raise ValueError(
                f"another {imported} is imported already, from {file}: install before it is imported, or "
                "pass replace=True"
            )
        for imported in before:
            del sys.modules[imported]
        sys.modules.update(modules)
        _set_in_parent(name)
        _replaced[name] = before
        _provided[name] = modules


def uninstall(name: str) -> None:
    """Undo `install`: what was in `sys.modules` before is there again. Idempotent.

    Raises:
        ValueError: There is no such name.
    """
    if name not in NAMES:
        raise ValueError(f"name must be one of {', '.join(NAMES)}, got {name!r}")
    with _lock:
        provided = _provided.pop(name, None)
        if provided is None:
            return
        for imported, module in provided.items():
            if sys.modules.get(imported) is module:
                del sys.modules[imported]
        sys.modules.update(_replaced.pop(name))
        _set_in_parent(name)


def installed() -> tuple[str, ...]:
    """Names that are provided now."""
    with _lock:
        return tuple(_provided)


def install_from_environment() -> None:
    """Install what `MOE_COMM_COMPAT` names.

    Raises:
        ValueError: It names something else, or another module of that name is imported.
    """
    for name in env.compat_names():
        install(name)


def _modules_of(name: str) -> dict[str, types.ModuleType]:
    """Every module to provide. All at once, so that none is ever imported a second time by its path."""
    provider = importlib.import_module(_PROVIDERS[name])
    found = {name: provider}
    for info in pkgutil.walk_packages(provider.__path__, f"{provider.__name__}."):
        alias = name + info.name.removeprefix(provider.__name__)
        found[alias] = importlib.import_module(info.name)
    for companion, provided in _COMPANIONS.get(name, {}).items():
        found[companion] = importlib.import_module(provided)
    return found


def _set_in_parent(name: str) -> None:
    """The package above has what `sys.modules` has, as after an import; nothing where it has nothing."""
    parent, _, last = name.rpartition(".")
    package = sys.modules.get(parent)
    if package is None:
        return
    if name in sys.modules:
        setattr(package, last, sys.modules[name])
    elif hasattr(package, last):
        delattr(package, last)


def _imported(name: str) -> dict[str, types.ModuleType]:
    roots = (name, *_COMPANIONS.get(name, ()))
    return {
        imported: module
        for imported, module in sys.modules.items()
        if any(f"{imported}.".startswith(f"{root}.") for root in roots)
    }
