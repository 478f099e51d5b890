"""How long schedules take beside XLA's own collectives, in the terms of nccl-tests."""
