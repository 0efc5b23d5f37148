import torch

from training.sample import sample


def always(token: int, vocab_size: int = 8):  # type: ignore[no-untyped-def]
    """A model that is sure of the next token."""

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        answer = torch.full((len(tokens), vocab_size), -1e9)
        answer[:, token] = 0.0
        return answer

    return logits


CPU = torch.device("cpu")


def test_writes_as_many_tokens_as_asked_and_stops_at_the_end_token() -> None:
    assert sample(always(3), start=0, end=0, num_entries=8, length=5, context=4, seed=0, device=CPU) == [3] * 5
    assert sample(always(0), start=0, end=0, num_entries=8, length=5, context=4, seed=0, device=CPU) == []


def test_the_model_sees_the_last_tokens_of_its_context() -> None:
    seen = []

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        seen.append(tokens.tolist()[0])
        return torch.nn.functional.one_hot((tokens[:, -1] + 1) % 8, 8) * 1e9

    assert sample(logits, start=0, end=7, num_entries=8, length=5, context=3, seed=0, device=CPU) == [1, 2, 3, 4, 5]
    assert seen == [[0], [0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4]]


def test_only_entries_of_the_tokenizer_are_drawn() -> None:
    tokens = sample(
        lambda t: torch.zeros(len(t), 99), start=0, end=4, num_entries=4, length=50, context=4, seed=0, device=CPU
    )
    assert set(tokens) == {0, 1, 2, 3}


def test_the_draw_follows_from_the_seed() -> None:
    def uniform(tokens: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(tokens), 1000)

    def draw(seed: int) -> list[int]:
        return sample(uniform, start=0, end=0, num_entries=1000, length=20, context=8, seed=seed, device=CPU)

    one, same, other = draw(1), draw(1), draw(2)
    assert one == same != other
