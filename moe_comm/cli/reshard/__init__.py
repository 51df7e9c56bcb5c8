"""What `moe-comm reshard` computes and prints."""
