"""Datasets of the hub or a local folder, through `datasets`: cached or streamed."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data.documents import Document, Reading, text_problem
from data.errors import DataError


class HubSource:
    """The documents of a cached dataset, row by row."""

    def __init__(self, dataset: Any, *, name: str, text_key: str) -> None:
        self.dataset, self.name, self.text_key = dataset, name, text_key
        self.size = float(len(dataset))

    def content_key(self, cache: Path) -> list[str]:
        return [self.dataset._fingerprint]

    def documents(self, reading: Reading) -> Iterator[Document]:
        return hub_documents(self.dataset, reading, self.name, self.text_key)


def load_hub(
    name: str, subset: str | None, split: str, text_key: str, *, streaming: bool, cache: Path | None
) -> tuple[Any, str]:
    """The dataset with its text column only, and a name for messages. Raises DataError for whatever keeps it away."""
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    where = f"{name}{f'/{subset}' if subset else ''}[{split}]"
    folder = Path(name).expanduser()
    try:
        if (folder / "state.json").exists() or (folder / "dataset_dict.json").exists():  # save_to_disk made it
            data = datasets.load_from_disk(str(folder))
            if isinstance(data, datasets.DatasetDict):
                if split not in data:
                    raise DataError(f"data.split={split} is not in {name}; valid: {', '.join(data)}")
                data = data[split]
            if streaming:
                data = data.to_iterable_dataset()
        else:
            path = str(folder) if folder.exists() else name
            cache_dir = str(cache) if cache else None
            data = datasets.load_dataset(path, subset, split=split, streaming=streaming, cache_dir=cache_dir)
    except DataError:
        raise
    except Exception as error:  # a dozen kinds: no network, no such dataset, a broken file, an unknown split
        raise DataError(f"data.name={where} cannot be loaded: {_first_line(error)}") from error
    if data.column_names is not None and text_key not in data.column_names:
        raise DataError(f"{where}: no column {text_key!r} (data.text_key), only {', '.join(data.column_names)}")
    return data.select_columns([text_key]), where


def hub_documents(dataset: Any, reading: Reading, name: str, text_key: str) -> Iterator[Document]:
    """Every document once, rows counted from 1 in the order of the dataset. Raises DataError."""
    batches = iter(dataset.iter(batch_size=1000))
    row = 0
    while True:
        try:
            batch = next(batches, None)
            if batch is None:
                return
            values = batch[text_key]
        except Exception as error:
            raise DataError(f"{name}: cannot be read after row {row}: {_first_line(error)}") from error
        for value in values:
            row += 1
            if problem := text_problem(value):
                reading.bad_row(f"{name}: row {row}", f"{text_key!r} {problem}")
            elif not value:
                reading.empty += 1
            else:
                yield Document(value, f"{name}: row {row}")
        reading.done = float(row)


def _first_line(error: Exception) -> str:
    cause = error.__cause__ or error
    return str(cause).strip().split("\n")[0] or type(cause).__name__
