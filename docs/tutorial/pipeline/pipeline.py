"""A pipeline over a folder of markdown: read each document, sum it up, publish the summary by HTTP.

The workflow is plain asyncio. Each `step` is written to the journal when it completes, so a process that takes the run
over after a crash goes on behind the last step that completed.
"""

from __future__ import annotations

import asyncio
import json
import re
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path

from replaykit import step, workflow


@dataclass
class Summary:
    """What the pipeline knows of one document."""

    path: str
    title: str
    words: int
    headings: list[str]
    links: list[str]


@workflow
async def publish_docs(folder: str, url: str, pause: float = 0.1) -> int:
    """Publish a summary of every markdown file below `folder` to `url`; returns how many there were."""
    documents = await step(find_documents, folder)
    for document in documents:
        summary = await step(summarise, folder, document)
        await step(publish, url, summary)
        await asyncio.sleep(pause)  # durable like any sleep in a workflow, be it for 0.1 s or for a month
    return len(documents)


def find_documents(folder: str) -> list[str]:
    """The markdown files below a folder, in order of their names."""
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*.md"))


def summarise(folder: str, document: str) -> Summary:
    """Read one file; find its title, headings and links, and count its words."""
    text = Path(folder, document).read_text(encoding="utf-8")
    headings = re.findall(r"^#+ +(.+)$", text, re.MULTILINE)
    links = re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", text)
    title = headings[0] if headings else document
    return Summary(document, title, len(text.split()), headings, sorted(set(links)))


def publish(url: str, summary: Summary) -> str:
    """Send a summary, with a key that is the same on every attempt; returns the id that the receiver gave it."""
    request = urllib.request.Request(
        url,
        data=json.dumps(asdict(summary)).encode(),
        headers={"Content-Type": "application/json", "Idempotency-Key": step.current().idempotency_key},
    )
    with urllib.request.urlopen(request, timeout=10) as response:
        answer: dict[str, str] = json.load(response)
    return answer["id"]
