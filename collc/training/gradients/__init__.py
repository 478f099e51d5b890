"""Gradients of a rank, and when and in what company they are reduced."""
