"""Checkpoints that are whole or refused, and restore on another number of devices."""
