"""What is called the same where it is measured and in the report."""

PSUM, AGAIN = "psum", "psum again"  # programs: XLA's own, and the very same a second time
STEP = "step"  # the job that is no all-reduce of so many bytes
