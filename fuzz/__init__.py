"""Fuzzing: damaged and hostile inputs against everything that reads a stranger's bytes. `python -m fuzz --help`.

A target is a module here with two functions: `seeds() -> list[bytes]`, whole inputs to begin from, among them every
finding so far; and `one(data: bytes) -> None`, which returns for an input that is read or refused as promised and
raises for any other. SECURITY.md says what is promised.
"""
