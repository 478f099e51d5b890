"""Ranks at their own pace: what happens when on a machine, what goes wrong, and how it looks."""
