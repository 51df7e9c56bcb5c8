"""Checks subjects of commits: `[area] verb ...` in at most 72 characters, the verb in the imperative.

python tools/commit_subjects.py            # the last commit, and all that the upstream branch lacks
python tools/commit_subjects.py FILE       # the message in a file, as a hook gets it
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

NUM_MAX_CHARACTERS = 72
SUBJECT = re.compile(r"\[[a-z][a-z0-9_]*\] ([a-z]+) \S")
# Words that subjects began with and that are no verbs; inflected ones are known by their ends.
NO_VERBS = frozenset(
    [
        "a",
        "all",
        "an",
        "and",
        "both",
        "each",
        "every",
        "few",
        "how",
        "in",
        "it",
        "long",
        "more",
        "no",
        "of",
        "on",
        "one",
        "same",
        "small",
        "the",
        "their",
        "this",
        "two",
        "what",
        "when",
        "where",
        "which",
        "who",
        "why",
    ]
)
INFLECTED = re.compile(r"\w*(?:[^aeious]s|es|[^e]ed|ing)")
VERBS = frozenset({"bring", "embed", "shed"})


def problem_of(subject: str) -> str | None:
    """Text of what is wrong with a subject, or None."""
    if len(subject) > NUM_MAX_CHARACTERS:
        return f"has {len(subject)} characters, at most {NUM_MAX_CHARACTERS} are shown"
    found = SUBJECT.match(subject)
    if found is None:
        return 'is not of the form "[area] verb ..."'
    verb = found[1]
    if verb in NO_VERBS or (INFLECTED.fullmatch(verb) and verb not in VERBS):
        return f'begins with "{verb}", which is no verb in the imperative'
    return None


def _subjects() -> Iterator[str]:
    if len(sys.argv) > 1:
        yield Path(sys.argv[1]).read_text().partition("\n")[0]
        return
    # A branch may have no upstream, and an export of the files no commits.
    for commits in (["-1"], ["--skip=1", "@{upstream}.."]):
        log = ["git", "log", "--no-merges", "--format=%s", *commits]
        yield from subprocess.run(
            log, capture_output=True, text=True, check=False
        ).stdout.splitlines()


def main() -> int:
    """Print what is wrong with each; returns the exit status."""
    problems = [(subject, problem) for subject in _subjects() if (problem := problem_of(subject))]
    for subject, problem in problems:
        print(f'commit subject "{subject}" {problem}', file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
