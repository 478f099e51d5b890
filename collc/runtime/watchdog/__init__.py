"""Who is where in a job, and its end when nobody gets further: beats, a judge of them, two threads."""
