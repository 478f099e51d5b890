"""``collc launch``: the processes of a job on this machine, watched, ended together, restarted."""
