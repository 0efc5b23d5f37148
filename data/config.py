"""The settings of `data=...`. Defaults live in `conf/data/base.yaml`; nothing heavy is imported here."""

from dataclasses import dataclass

from checks import at_least, at_most, one_of

SOURCES = ("stdlib", "files", "hf", "synthetic")
BAD_ROWS = ("error", "skip")


@dataclass
class DataConfig:
    """Where the text comes from and how it becomes tokens. Raises ValueError, one line, when a value can't be used."""

    source: str  # one of SOURCES
    path: str | None  # files: a file, a folder or a glob of txt, md, jsonl, parquet, each also as .gz
    name: str | None  # hf: the name of a dataset on the hub, or a local folder
    subset: str | None  # hf: a configuration of that dataset
    split: str  # hf
    text_key: str  # the column (jsonl, parquet, hf) that holds the text
    tokenizer: str  # bytes, bpe, a tokenizer.json or a hub name
    bad_rows: str  # one of BAD_ROWS
    max_bad_rows: int  # with bad_rows=skip: one more than this is an error
    streaming: bool  # hf: read over the network while training, without a cache
    workers: int | None  # threads that tokenize; None: one per core. They change no token
    cache_dir: str | None  # None: $XDG_CACHE_HOME/ndgpt, or ~/.cache/ndgpt
    held_out: float  # the fraction of the documents kept for evaluation
    tokens: int  # synthetic: how many tokens are made

    def __post_init__(self) -> None:
        one_of("data.source", self.source, SOURCES)
        one_of("data.bad_rows", self.bad_rows, BAD_ROWS)
        for key in ("split", "text_key", "tokenizer"):
            if not getattr(self, key):
                raise ValueError(f"data.{key} is empty; valid: a name")
        if self.source == "files" and not self.path:
            raise ValueError(
                "data.source=files needs data.path; valid: a file, a folder or a glob such as 'texts/*.txt'"
            )
        if self.path and self.source != "files":
            raise ValueError(f"data.path={self.path} is read by data=files alone; valid: data=files data.path=...")
        if self.name and self.source != "hf":
            raise ValueError(f"data.name={self.name} is read by data=hf alone; valid: data=hf data.name=...")
        if self.source == "hf" and not self.name:
            raise ValueError("data.source=hf needs data.name; valid: a dataset on the hub or a local folder")
        if self.streaming and self.source != "hf":
            raise ValueError(f"data.streaming=true with data.source={self.source}; valid: data.source=hf")
        at_least("data", self, 0, "max_bad_rows")
        at_least("data", self, 1, "workers")
        at_least("data", self, 1024, "tokens")  # two documents
        at_most("data", self, 10**9, "tokens")  # they are made in memory
        if not 0.0 < self.held_out < 1.0:
            raise ValueError(f"data.held_out={self.held_out} is not valid; valid: above 0 and below 1")

    @property
    def skippable_rows(self) -> int:
        """How many malformed rows are passed over before one is an error."""
        return self.max_bad_rows if self.bad_rows == "skip" else 0
