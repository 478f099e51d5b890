"""``collc doctor``: what is wrong with a host, its settings and its links, before a run finds out."""
