"""Pipelines to compare with: all-to-all of rows, tuned as far as their libraries allow."""
