"""Everything that knows transformers' continuous batching: its managers share their prefixes.

from kvshm.hooks.transformers import share

manager = share(model.init_continuous_batching(...))
"""

import transformers

from .versions import too_old

if _reason := too_old(transformers.__version__):  # else a name of its internals would be missing
    raise ImportError(_reason)

from .managers import node_of, share, share_all, stats_of

__all__ = ["node_of", "share", "share_all", "stats_of"]
