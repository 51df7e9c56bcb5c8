"""`moe-comm bench checkpoint`: models to files and back, next to plain files, torch and transformers."""
