"""What processes compare of their versions, flags and settings."""

from collc.runtime.facts import facts
from collc.runtime.place import Place


def test_what_launch_says_is_not_compared(monkeypatch):
    before = facts()
    for name, value in Place("127.0.0.1:1", 4, 3, "h3", restarts=1).environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", "127.0.0.1:1")
    monkeypatch.setenv("JAX_PARTITION_INDEX", "1")
    assert facts() == before


def test_flags_are_compared_but_for_where_a_process_writes(monkeypatch, tmp_path):
    monkeypatch.setenv("XLA_FLAGS", "--xla_b=1 --xla_a=2")
    before = facts()
    assert before["XLA_FLAGS"] == "--xla_a=2 --xla_b=1"
    kept = tmp_path / "flags"
    kept.write_text("--xla_a=2\n--xla_b=1\n--xla_dump_to=/here\n")
    monkeypatch.setenv("XLA_FLAGS", str(kept))
    assert facts() == before
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1 --xla_b=1")
    assert facts() != before
