"""Everything that knows transformers' continuous batching: its managers share their prefixes.

from kvshm.hooks.transformers import share

manager = share(model.init_continuous_batching(...))
"""

from .managers import node_of, share, share_all, stats_of

__all__ = ["node_of", "share", "share_all", "stats_of"]
