"""`vtoken plan`: how many requests fit on a GPU, and what the queue looks like, before one is bought or started."""
