"""What the default run and experiment=longer_run learn, beside models that only count.

    python benchmarks/learning.py                        runs both: about 20 minutes on two cores
    python benchmarks/learning.py runs/ONE runs/OTHER    reads two finished runs instead

All four losses are nats per token over the same held-out tokens, those an evaluation scores.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from hydra import compose, initialize_config_dir

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from data.corpus import open_corpus  # noqa: E402
from data.stream import Stream  # noqa: E402
from training.job import make_job  # noqa: E402


def counting_models() -> tuple[float, float]:
    """Unigram entropy of the scored tokens, and a bigram model fitted on the training part; nats per token.

    The unigram model is the scored tokens' own frequencies: no unigram model does better on them. The bigram model
    mixes the training part's pair frequencies with its single ones, by the weight that suits the scored tokens best,
    so the comparison favours it.
    """
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        job = make_job(compose("config"))
    vocab = job.config.model.vocab_size
    corpus = open_corpus(job.config.data, vocab, job.config.seed)
    assert isinstance(corpus.train, Stream)
    scored = corpus.scored(job.config.train.eval_tokens).astype(np.int64)
    before, after = scored[:-1], scored[1:]

    counts = np.bincount(after)
    chances = counts[counts > 0] / len(after)
    unigram = float(-(chances * np.log(chances)).sum())

    tokens = corpus.train.read(0, corpus.train.tokens_per_epoch)
    pairs = np.bincount(tokens[:-1] * vocab + tokens[1:], minlength=vocab * vocab).reshape(vocab, vocab)
    singles = (np.bincount(tokens, minlength=vocab) + 1) / (len(tokens) + vocab)
    given = pairs[before, after] / np.maximum(pairs.sum(1), 1)[before]
    mixes = [-np.log(weight * given + (1 - weight) * singles[after]).mean() for weight in np.linspace(0.5, 0.99, 50)]
    return unigram, float(min(mixes))


def run(*overrides: str) -> tuple[float, float]:
    """Last evaluation loss of a run, and its seconds from start to end."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        command = [sys.executable, str(ROOT / "train.py"), *overrides, f"hydra.run.dir={folder}/run"]
        subprocess.run(command, check=True)
        return last_eval_loss(Path(folder) / "run"), time.monotonic() - began


def last_eval_loss(folder: Path) -> float:
    """The end of a run's metrics.jsonl."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return float([line["eval_loss"] for line in lines if "eval_loss" in line][-1])


if __name__ == "__main__":
    unigram, bigram = counting_models()
    if len(sys.argv) == 3:
        default, longer = (last_eval_loss(Path(folder)) for folder in sys.argv[1:])
        times = ["", ""]
    else:
        (default, seconds), (longer, longer_seconds) = run(), run("experiment=longer_run")
        times = [f" ({seconds:.0f} s)", f" ({longer_seconds:.0f} s)"]
    print("| model | nats per held-out token |\n| --- | --- |")
    print(f"| unigram: the held-out tokens' own frequencies | {unigram:.3f} |")
    print(f"| the default run{times[0]} | {default:.3f} ({1 - default / unigram:.0%} below unigram) |")
    print(f"| bigram, fitted on the training part | {bigram:.3f} |")
    print(f"| experiment=longer_run{times[1]} | {longer:.3f} |")
