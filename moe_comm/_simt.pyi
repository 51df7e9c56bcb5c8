"""The GPU backend on the emulator; see docs/emulator.md."""
