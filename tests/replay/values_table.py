"""The tables of docs/reference/values.md, made by asking the codec.

python -m tests.replay.values_table --write
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from replaykit.errors import NotJournalable, StepFailed
from replaykit.replay.codec import Codec, codec_for
from replaykit.replay.failures import decode_error, encode_error
from tests.replay.kinds import ERRORS, KINDS, same, sentence

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "values.md"
WRITE = "python -m tests.replay.values_table --write"


def outcome(codec: Codec, value: Any) -> str:
    """What becomes of a value: `exact`, a word on what is not, or the sentence that refuses it."""
    try:
        twin = codec.encode_checked(value)[1]
    except NotJournalable as refused:
        return _stable(sentence(refused))
    if same(value, twin):
        if isinstance(value, BaseModel) and value.model_fields_set != twin.model_fields_set:
            return "exact; each field counts as set"
        return "exact"
    return f"equal, as the declared {'class' if type(value) is type(twin) else type(twin).__name__}"


def error_outcome(error: BaseException) -> str:
    """What a workflow catches where a body raised `error`."""
    twin = decode_error(encode_error(error))
    if type(twin) is StepFailed:
        return f"`StepFailed`, `.type` is `{twin.type.replace(f'{KINDS_MODULE}.', 'shop.')}`"
    notes = [note for note in getattr(twin, "__notes__", ()) if note.startswith("replaykit: not recorded: ")]
    left_out = [_stable(note.partition("not recorded: ")[2]) for note in notes]
    return f"its own class, without {left_out[0]}" if left_out else "exact"


KINDS_MODULE = same.__module__


def _stable(text: str) -> str:
    """Without what differs between releases of pydantic."""
    text = re.sub(r"(from its own JSON) \(.*?\)(?=: an open|$)", r"\1", text)
    return re.sub(r" \(Pydantic\w+\)", "", text)


def annotation_text(annotation: Any) -> str:
    if isinstance(annotation, type) and not hasattr(annotation, "__args__"):
        return annotation.__qualname__
    return re.sub(r"(?:\b[a-z_]\w*\.)+(?=[A-Za-z])|<class '|'>", "", repr(annotation))


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def values_table() -> str:
    """A row for each kind of value: under its annotation, and under none."""
    found = [_row("value", "annotation", "under it", "under no annotation"), "|---|---|---|---|"]
    for label, annotation, value, _ in KINDS:
        untyped = outcome(codec_for(Any), value)
        typed = outcome(codec_for(annotation), value)
        found.append(_row(label, f"`{annotation_text(annotation)}`", typed, untyped))
    return "\n".join(found)


def errors_table() -> str:
    """A row for each kind of exception."""
    found = [_row("raised by a body", "caught in the workflow"), "|---|---|"]
    found += [_row(label, error_outcome(error)) for label, error in ERRORS]
    return "\n".join(found)


TABLES = {"values": values_table, "errors": errors_table}


def written(page: str, names: Iterable[str] = tuple(TABLES)) -> str:
    """The page with its tables made anew."""
    for name in names:
        table = TABLES[name]()
        before, mark, rest = page.partition(f"<!-- {name}: made by {WRITE} -->\n")
        _, end, after = rest.partition("\n<!-- end -->")
        assert mark and end, f"{PAGE.name} has no marks for the table {name!r}"
        page = before + mark + table + end + after
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"rewrite {PAGE.name}; else the page is printed")
    page = written(PAGE.read_text(encoding="utf-8"))
    if parser.parse_args().write:
        PAGE.write_text(page, encoding="utf-8")
    else:
        print(page)


if __name__ == "__main__":
    main()
