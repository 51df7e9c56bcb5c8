"""The drawings of the docs, made of what they show: `python -m tools.drawings FOLDER` writes them all."""
