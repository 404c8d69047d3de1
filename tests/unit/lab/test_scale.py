"""Counts of operations, which do not grow with the world, and bytes that grow no faster than it."""

from lab.scale import exponent, in_memory


def test_operations_of_a_start_and_a_save_are_as_many_in_any_world(monkeypatch):
    monkeypatch.setattr("lab.scale.NUM_FORWARDS", 0)
    costs = {size: in_memory(size) for size in (64, 4096)}
    for name in ("operations, start, another rank", "operations, save, another rank", "operations, save, first rank"):
        assert max(of_size[name] for of_size in costs.values()) <= 60
    read = {size: of_size["bytes of replies, save, first rank"] for size, of_size in costs.items()}
    assert 0.9 < float(exponent(read)) < 1.1
