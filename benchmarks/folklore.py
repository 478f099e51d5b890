"""What people write about collectives, one by one, beside what the prices say: docs/folklore.md.

python benchmarks/folklore.py            writes the page
python benchmarks/folklore.py --check    fails where the page is not what this would write
"""

import argparse
import difflib
import sys
from pathlib import Path

import folklore_counts
import folklore_models
import folklore_networks
import folklore_racks
import folklore_rule
from common import prose, table
from folklore_common import Entry

PAGE = Path(__file__).parents[1] / "docs" / "folklore.md"
# In the order of the page: counts first, then networks, then what they come to.
FACTS = (
    folklore_counts.naive,
    folklore_networks.share,
    folklore_counts.servers,
    folklore_counts.star,
    folklore_counts.roots,
    folklore_racks.order,
    folklore_racks.speeds,
    folklore_networks.eight,
    folklore_networks.slow,
    folklore_models.exchange,
    folklore_models.embeddings,
    folklore_rule.rule,
)


def entries() -> list[Entry]:
    """All of them, worked out."""
    return [fact().entry() for fact in FACTS]


def page() -> str:
    """The text of the page."""
    found = entries()
    rows = [[f"[{e.title}](#{anchor(e.title)})", e.verdict] for e in found]
    lines = [
        "# Folklore",
        "",
        *prose(
            "What people write about all-reduce and its relatives, one by one: the claim, our "
            "verdict, the numbers. Made by `python benchmarks/folklore.py`, which CI repeats. "
            "**Every number is one of our model's; nothing here was timed on a GPU.** Parameters "
            "(models, batches, networks) are ours and stated: a saying comes without any."
        ),
        "",
        *prose(
            "Three prices are told apart. *Abstract*: messages on links, in lock-step. "
            "*Simulated*: the same, each rank at its own pace. *Lowered*: what XLA would run, a "
            "launch for each round; XLA's own collectives have this price only, by NCCL's model. "
            "Verdicts, shares and gains are by the lowered one. `S` is the buffer of a rank."
        ),
        "",
        *table(["saying", "verdict"], rows),
        "",
    ]
    for entry in found:
        lines += [*entry.page(), ""]
    return "\n".join(lines).rstrip() + "\n"


def anchor(title: str) -> str:
    """The fragment by which GitHub finds a heading.

    >>> anchor("One server, k shards: 70 %")
    'one-server-k-shards-70-'
    """
    kept = "".join(c for c in title.lower() if c.isalnum() or c in " -_")
    return kept.replace(" ", "-")


def difference(text: str) -> str:
    """How the committed page differs from the text; "" where it does not."""
    old = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    lines = difflib.unified_diff(
        old.splitlines(), text.splitlines(), str(PAGE.name), "as made now", lineterm=""
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if it differs")
    options = parser.parse_args()
    text = page()
    if not options.check:
        PAGE.write_text(text, encoding="utf-8")
        print(f"wrote {PAGE}")
    elif found := difference(text):
        print(found)
        sys.exit(
            "docs/folklore.md is not what the prices give now: run python benchmarks/folklore.py"
        )


if __name__ == "__main__":
    main()
