"""A vLLM engine under attack: a model made on the spot, sixteen requests, kills, the verdict."""
