"""What jax.profiler noted of a real run, read back by collc's named scopes."""

from collc.receipts.profile.spans import Profile as Profile
from collc.receipts.profile.spans import Span as Span
from collc.receipts.profile.spans import read_profile as read_profile
