"""The other engines of the node: how an engine hears of them and what it knows of each."""
